"""A question, cut into the parts that are to be answered one after the other. Rules for English, not a model.

"What is the code of the garage, and when does the library open?" has two parts. Handles conjoined questions, several
questions in a message and "What are the X and the Y?". Not handled: comparisons ("Which is cheaper, the X or the Y?"),
and a pronoun whose noun is not the subject of the part before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_PARTS = 3
MAX_CHARACTERS = 1000  # of a message's end, that are read: patterns take the square of them

_ASKING = (
    r"(?:(?:at|in|on|for|from|by|to|with|until|under|of|between|within|behind|through|since)\s+)?"
    r"(?:what(?:'s)?|when|where|who|whom|whose|which|why|how)\b"
)
_CLAUSE = re.compile(
    rf"(?:,|;|:)?\s+(?:and|plus|as well as)\s+(?:also\s+|then\s+|please\s+|tell me\s+)?(?={_ASKING}"
    r"|(?:is|are|was|were|do|does|did|can|may|has|have)\s+(?:the|my|our|i|we|it|they|there)\b)",
    re.IGNORECASE,
)
_NOUN = r"(?:the|my|our|your|his|her|their|its|a|an)\s"
_LISTED = re.compile(rf"^(what|who|where|when)\s+(?:are|were)\s+({_NOUN}.+?),?\s+and\s+({_NOUN}.+)$", re.IGNORECASE)
_WISHED = re.compile(
    r"^((?:please\s+)?(?:(?:can|could)\s+you\s+)?(?:tell me|give me|i need|i want|do you know|remind me of)\s+)"
    rf"({_NOUN}.+?),?\s+and\s+(?:also\s+)?({_NOUN}.+)$",
    re.IGNORECASE,
)
_SHARED = re.compile(
    rf"^((?:{_ASKING}(?:\s+(?:much|many|long|far|often|old|late|early)\b)?(?:\s+\w+)?))\s+(do|are|were|did|have)\s+"
    rf"({_NOUN}.+?)\s+and\s+({_NOUN}.+)$",
    re.IGNORECASE,
)
_SINGULAR = {"do": "does", "are": "is", "were": "was", "did": "did", "have": "has"}
_SUBJECT = re.compile(
    r"\b(?:do|does|did|is|are|was|were|can|will|has|have|of|for)\s+((?:the|my|our)\s+[\w'-]+(?:\s+(?:of\s+)?[A-Z][\w'-]*)*)"
)
_PRONOUN = re.compile(r"\b(it|they|he|she|there)\b", re.IGNORECASE)
_ASKED = re.compile(rf"^{_ASKING}(?:\s+(?:time|date|day|much|many))?\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[?!.])\s+|\n+")


def asked(message: str) -> tuple[str, str]:
    """(what stands before the question, the question): the sentences that end with a question mark, else all of it."""
    sentences = [each.strip() for each in _SENTENCE.split(message[-MAX_CHARACTERS:]) if each.strip()]
    questions = [each for each in sentences if each.endswith("?")]
    if not questions:
        return "", " ".join(sentences)
    return "\n".join(each for each in sentences if each not in questions), " ".join(questions)


def parts_of(message: str) -> tuple[str, ...]:
    """At least one; what follows the last of MAX_PARTS is left out."""
    question = asked(message)[1]
    found: list[str] = []
    for sentence in re.split(r"(?<=\?)\s+", question):
        for clause in _CLAUSE.split(sentence.strip().rstrip("?.! ")):
            found += _conjoined(clause.strip(" ,;"))
    named = [found[0], *(_whole(part, found[0]) for part in found[1:])] if found else [question]
    return tuple(f"{part[:1].upper()}{part[1:]}?" for part in named[:MAX_PARTS])


def _conjoined(clause: str) -> list[str]:
    """The parts of a clause that asks for two things with one verb."""
    if match := _LISTED.match(clause):
        verb = {"what": "what is", "who": "who is", "where": "where is", "when": "when is"}[match[1].lower()]
        return [f"{verb} {match[2]}", f"{verb} {match[3]}"]
    if match := _WISHED.match(clause):
        return [f"{match[1]}{match[2]}", f"{match[1]}{match[3]}"]
    if match := _SHARED.match(clause):
        verb = _SINGULAR[match[2].lower()]
        last = match[4].rsplit(" ", 1)[-1] if match[2].lower() in ("do", "did") else ""
        return [f"{match[1]} {verb} {match[3]} {last}".strip(), f"{match[1]} {verb} {match[4]}"]
    return [clause]


def _whole(part: str, first: str) -> str:
    """The part with what it leaves to the first one: its subject for a pronoun, and all but "where" for that alone."""
    if _ASKED.fullmatch(part):
        return _ASKED.sub(part, first)
    subject = _SUBJECT.search(first)
    if subject is None or subject[1].split(" ", 1)[-1].lower() in part.lower():
        return part
    return _PRONOUN.sub(subject[1], part, count=1)


# ---- the properties of an answer in JSON ----------------------------------------------------------------------------
_KINDS = (  # names of properties, the question that they ask, and how a question of that kind begins
    ("when time date day hour hours opens opening closes closing start end begin begins deadline due year month"
     " departure arrival", "When", r"when\b|(?:at\s)?what\s(?:time|date|day|year|month)\b"),
    ("where place location address city town venue room area station harbour port", "Where",
     r"where\b|(?:in|at)?\s?(?:what|which)\s(?:place|town|city|room)\b"),
    ("who person owner author contact people host", "Who", r"who(?:m|se)?\b"),
    ("price cost costs amount fee total rent fare", "How much", r"how\smuch\b|what\b.*\bcosts?\b"),
    ("count quantity", "How many", r"how\smany\b"),
    ("why reason", "Why", r"why\b"),
)  # fmt: skip
_CLOCK = re.compile(r"(\d{1,2}[:.]\d\d) in the morning")
_ANSWERING = re.compile(r"\b(?:answer|result|response|value|text|output|content|reply|message|final|summary|title)\b")


def words_of(name: str) -> str:
    """The words of a property's name: "unit price" of `unitPrice` and `unit_price`."""
    return " ".join(re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name))).lower()


def question_for(name: str, parts: Sequence[str]) -> str:
    """What is asked for a property of the answer: the part of the question of its kind, or one that is made of both.

    parts: see `parts_of`.
    """
    words = words_of(name)
    named = words.split()
    if not named or _ANSWERING.search(words):
        return parts[0]
    for names, asking, begins in _KINDS:
        if set(named) & set(names.split()):
            for part in parts:
                if re.match(begins, part, re.IGNORECASE):
                    return part
            if _ASKED.match(parts[0]):
                return _ASKED.sub(asking, parts[0])
    asks = re.compile(rf"\b(?:is|are|was|were)\s+{_NOUN}(?:\w+\s+)?{words}\b", re.IGNORECASE)
    return next((part for part in parts if asks.search(part)), f"What is the {words}? {parts[0]}")


def of_kind(text: str, words: str) -> str:
    """The text as a value of these words: "8:30" of "8:30 in the morning" for a time."""
    clock = _CLOCK.fullmatch(text) if words.split()[-1:] == ["time"] else None
    return text if clock is None else clock[1]
