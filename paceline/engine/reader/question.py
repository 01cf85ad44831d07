"""A question, cut into the parts that are to be answered one after the other. Rules for English, not a model.

"What is the code of the garage, and when does the library open?" has two parts. Handles conjoined questions, several
questions in a message and "What are the X and the Y?". Not handled: comparisons ("Which is cheaper, the X or the Y?"),
and a pronoun whose noun is not the subject of the part before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

MAX_PARTS = 3
MAX_CHARACTERS = 1000  # of a question: patterns take the square of them

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
_LISTED = re.compile(
    rf"^(what|who|where|when)\s+(is|was|are|were)\s+({_NOUN}.+?),?\s+and\s+({_NOUN}.+)$", re.IGNORECASE
)
_OF_BOTH = re.compile(r"\b(?:sum|total|difference|distance|average|ratio)\b", re.IGNORECASE)
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
    """(what stands beside the question, the question): the sentences that end with a question mark, else all of it. Of
    a long message those at its end, else those at its beginning: what is between may be a letter that asks things."""
    sentences = [each.strip() for each in _SENTENCE.split(message) if each.strip()]
    near = (_ending(sentences), _ending(sentences[::-1])[::-1])
    questions = next(filter(None, ([each for each in some if each.endswith("?")] for some in near)), near[0])
    beside = "\n".join(each for each in sentences if each not in questions)
    return beside, " ".join(questions)[-MAX_CHARACTERS:]


def _ending(sentences: Sequence[str]) -> list[str]:
    """The last sentences, at least one, of so many characters together as a question may have."""
    lengths = accumulate(len(each) + 1 for each in reversed(sentences))
    return list(sentences[-max(1, sum(length <= MAX_CHARACTERS for length in lengths)) :])


def parts_of(message: str, most: int = MAX_PARTS) -> tuple[str, ...]:
    """At least one; what follows the last of `most` is left out."""
    question = asked(message)[1]
    found: list[str] = []
    for sentence in re.split(r"(?<=\?)\s+", question):
        for clause in _CLAUSE.split(sentence.strip().rstrip("?.! ")):
            found += _conjoined(clause.strip(" ,;"))
    named = [found[0], *(_whole(part, found[0]) for part in found[1:])] if found else [question]
    return tuple(f"{part[:1].upper()}{part[1:]}?" for part in named[:most])


_REFERS: Final = re.compile(
    r"\b(?:it|its|he|him|his|she|her|hers|they|them|their|this|that|these|those|there|then|one|ones|so|each|both|same"
    r"|others?|else|former|latter)\b",
    re.IGNORECASE,
)
_QUOTING: Final = re.compile(r"[\"`\u201c\u201d\u00ab\u00bb(\[{]|(?:^|\s)['\u2018]")
# "Who designed the building?": one thing without a name or a word more may be what the part before is about.
_BARE: Final = re.compile(
    rf"(?i:{_ASKING})(?:\s+(?:much|many|long|far|often|old|late|early))?(?:\s+[a-z]+)??\s+the\s+[a-z]+"
    r"(?:\s+(?:[a-z]+(?:ed|en|own|ilt|ade|ung|old|ent|eft|ost|ught)|for|from|like|open|close|begin|start|end|cost))?\?"
)
MAX_ALONE: Final = 300  # characters of a message that is nothing but questions


def only_asks(message: str) -> bool:
    """True of a short message that is nothing but questions in words of its own: no quotation, nothing to do."""
    text = message.strip()
    before, question = asked(text)
    short = not before and len(text) <= MAX_ALONE and "\n" not in text
    return short and _ASKED.match(question) is not None and _QUOTING.search(text) is None


def separate_questions(message: str) -> tuple[str, ...]:
    """The parts of a message that only asks, where each can be asked by itself in its own words; else none, as where
    there are more than MAX_PARTS."""
    if not only_asks(message):  # a quotation may hold what looks like a further question
        return ()
    parts = parts_of(message, MAX_PARTS + 1)
    alone = all(_ASKED.match(part) and part[:-1].lower() in message.lower() for part in parts)
    alone = alone and not any(_ASKED.fullmatch(part[:-1]) for part in parts)  # "What time and where is the fair?"
    alone = alone and not any(map(_REFERS.search, parts[1:])) and not any(map(_BARE.fullmatch, parts[1:]))
    return parts if 1 < len(parts) <= MAX_PARTS and alone else ()


def _conjoined(clause: str) -> list[str]:
    """The parts of a clause that asks for two things with one verb."""
    if match := _LISTED.match(clause):
        word, verb, *both = match.groups()
        # Two things of something each: "the name of the inn and the brewery" asks for one.
        are_two = verb.lower() in ("are", "were") or all(re.search(r"\s(?:of|for)\s", each) for each in both)
        if are_two and not _OF_BOTH.search(both[0]):
            return [f"{word.lower()} is {each}" for each in both]
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
_KINDS = tuple(  # words of a property's name, how a question of that kind begins, and what asks for it
    (frozenset(names.split()), asking, re.compile(begins, re.IGNORECASE))
    for names, asking, begins in (
        (
            "when time date day hour hours opening closing start end deadline due year month departure arrival",
            "When",
            r"when\b|(?:at\s)?what\s(?:time|date|day|year|month)\b",
        ),
        (
            "where place location address city town venue room area station",
            "Where",
            r"where\b|(?:(?:in|at)\s)?(?:what|which)\s(?:place|town|city|room)\b",
        ),
        ("who person owner author contact people host", "Who", r"who(?:m|se)?\b"),
        ("price cost costs amount fee total rent fare", "How much", r"how\smuch\b|what\b.*\bcosts?\b"),
        ("count quantity", "How many", r"how\smany\b"),
        ("why reason", "Why", r"why\b"),
    )
)
_IS = re.compile(rf"\b(?:is|are|was|were) {_NOUN}(.*)", re.IGNORECASE)
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
    if asks_all(words):
        return parts[0]
    for names, asking, begins in _KINDS:
        if names & set(words.split()):
            for part in parts:
                if begins.match(part):
                    return part
            if _ASKED.match(parts[0]):
                return _ASKED.sub(asking, parts[0])
    for part in parts:
        if (match := _IS.search(part)) and match[1].lower().startswith(words):
            return part
    return f"What is the {words}? {parts[0]}"


def asks_all(words: str) -> bool:
    """True for names that stand for the whole answer, as "final answer"."""
    return not words or _ANSWERING.search(words) is not None


def of_kind(text: str, words: str) -> str:
    """The text as a value of these words: "8:30" of "8:30 in the morning" for a time."""
    clock = _CLOCK.fullmatch(text) if words.split()[-1:] == ["time"] else None
    return text if clock is None else clock[1]


# ---- what is no question for a document -----------------------------------------------------------------------------
ABILITIES = (
    "I answer questions with words from the documents, and say so where they have no answer. With the demonstration's "
    "documents try: When does the Harbour Library of Tarnwick open? When is my sister Orla's wedding? What is the "
    "password for our wifi and who is the captain of the ferry Marabel? With yours, ask for a time, a name or a price"
)
CANNOT = (
    "I answer questions with words from the documents, and cannot summarise, translate or write texts: ask for "
    "something that stands in the documents, such as a time, a name or a price"
)
ENGLISH_ONLY = "I read English only, and find no answer to this in the documents: please ask in English"
_GREET = (
    r"(?:hi+|hello+|hey+|howdy|greetings|good (?:morning|afternoon|evening|day)|hallo|guten tag|bonjour|salut|hola|ciao"
    r"|thanks?|thank you|many thanks|thx|cheers|bye|goodbye|ok(?:ay)?|great|cool|nice|test|ping|help)"
)
_GREETING = re.compile(rf"\b{_GREET}\b")
_POLITE = re.compile(
    rf"(?:{_GREET}|there|all|everyone|again|you|so|very|much|a lot|for (?:your|the|that) ?(?:help|answer)?"
    r"|how are you(?: doing)?|how is it going|what's up|nice to meet you|please|me|today|-p|-)(?: |$)"
)
_ITSELF = (  # ends such a question; what it goes on with otherwise is something that a document may know
    r"(?: (?:with|for|about|of|to|and|exactly|really|here|now|today|best|all|else|anyway"
    r"|me|us|my|you|your|yourself|it|this|that|them|documents|files|questions|chat|bot|model|assistant|demo|page|app))*"
)
_ABOUT_ITSELF = re.compile(
    r"(?:so )?(?:(?:what (?:can|could|do) (?:you|i) (?:do|help|answer|know|ask|offer)|what (?:are|is) (?:you|this)"
    r"|who are you|what (?:kind of )?(?:questions|documents|model|things) (?:can|do|are|have) (?:you|i)"
    r"(?: (?:do|help|answer|know|ask|offer|have|read|see|understand))?"
    r"|how (?:can|do|does|should) (?:you|i|this|it) (?:help|work|use)|(?:can|could|will) you help"
    rf"|help me|introduce yourself|tell me about yourself|what are you able to do){_ITSELF}"
    r"|your (?:abilities|capabilities))"
)
_MAKING = r"(?:give me|write|make|create|draft|compose|generate|produce|provide)(?! down)(?: me)?"
_WRITING = re.compile(
    r"(?:please |kindly |can you |could you |would you |will you |i want you to |i'd like you to )*"
    r"(?:summari[sz]e|sum up|translate|paraphrase|rephrase|rewrite|proofread|tl;?dr"
    rf"|{_MAKING}(?: (?:an?|the|some))?(?: \w+){{0,2}} (?:summary|overview|translation|poem|story|essay|joke)"
    # A document may hold others: "give me the code of the garage".
    rf"|{_MAKING}(?: (?:an?|some))?(?: (?!(?:the|my|our)\b)\w+){{0,2}} "
    r"(?:e-?mail|letter|text|code|function|script|song)"
    r"|tell me a (?:joke|story))\b"
)
_CONVERSED = re.compile(r"\b(?:conversation|chat|dialogue|discussion)\b", re.IGNORECASE)
# What front ends ask of a conversation.
_WISHING = r"\b(?:generate|provide|create|write|suggest|give|produce|determine|come up with)\b[^.\n]{0,80}?"
_TASKS = {
    name: re.compile(asks, re.IGNORECASE)
    for name, asks in {
        "emoji": r"\bfitting emoji\b",
        "follow_ups": rf"{_WISHING}\b(?:follow-?\s?ups?|questions)\b",
        "queries": rf"{_WISHING}\bquer(?:y|ies)\b|\bsearch queries\b",
        "tags": rf"{_WISHING}\btags\b",
        "title": rf"{_WISHING}\btitle\b|\btitle (?:for|of) (?:the|this) (?:chat|conversation)",
    }.items()
}
_NAMED = re.compile(r'{\s{0,20}"(\w+)"')
_MAX_TASK = 8000  # characters of such a prompt's end
_QUOTED = re.compile(r"<(chat_history|conversation|messages|context)>(.*)</\1>", re.DOTALL)
_BEHIND = re.compile(r"\b(?:conversation|chat history|chat|messages?)\W{0,4}:(.*)", re.DOTALL | re.IGNORECASE)
_USER = re.compile(r"^\W{0,4}(?:user|human|me|question)\W{0,4}:(.+)$", re.MULTILINE | re.IGNORECASE)
_NAMES = re.compile(r"[A-Z][\w'-]{1,30}(?: (?:of )?[A-Z][\w'-]{1,30}){0,6}")
_ENGLISH = (
    "the a an of in on at to for from by with and or is are was were be do does did can could will would should may "
    "has have had i we you he she it they my our your his her its their me us what when where who whom whose which why "
    "how much many long often this that there any all some get please tell not"
)
_FOREIGN = (
    "wann wo wer wie warum wieso welche welcher welches ist sind der das ein eine und nicht mein meine unser unsere "
    "mit auf von zu zum zur wird wurde kostet gibt ich sie wir den dem des im am beim bitte hat quand où qui que quel "
    "quelle est sont le la les une des du et pour avec dans mon ma mes notre combien comment pourquoi cuándo cuando "
    "dónde donde quién cuánto cuanto cómo como es son el los las una del y para con por quando dove chi quale perché "
    "il lo gli di della per wanneer waar wie wat hoe welke het een van voor met mijn zijn onde quem qual por é são um "
    "uma kiedy gdzie kto jak jest när var vem hur är och det som hvornår hvor hvem hvordan er og"
)


def own_answer(message: str, earlier: str) -> tuple[str, dict[str, str]] | None:
    """What is said to a message that asks nothing of a document, and the same by names of properties; None if it may.

    Greetings, questions about the reader, wishes that it cannot fulfil, and what front ends ask of a conversation.
    earlier: what the user has said before.
    """
    if (wanted := _task(message[-_MAX_TASK:], earlier)) is not None:
        return wanted
    said = " ".join(message.lower().split()).strip(" !.?,:;)(")
    if len(said) > MAX_CHARACTERS:
        return None
    words = re.sub(r"[!.?,:;()]+", " ", said).split()
    if _ABOUT_ITSELF.fullmatch(said) or (words and _is_polite(" ".join(words))):
        return f"{ABILITIES}.", {"answer": f"{ABILITIES}."}
    return (f"{CANNOT}.", {"answer": f"{CANNOT}."}) if _WRITING.match(said) else None


def _is_polite(said: str) -> bool:
    if _GREETING.search(said) is None:
        return False
    while said:
        if (match := _POLITE.match(said)) is None:
            return False
        said = said[match.end() :]
    return True


def is_foreign(message: str) -> bool:
    """True for a message whose words are those of another language than English, as far as small words tell."""
    letters = [letter for letter in message if letter.isalpha()]
    if sum(letter > "\u024f" for letter in letters) * 2 > len(letters):
        return True
    words = re.findall(r"[^\W\d_]+", message.lower())
    foreign, english = (sum(word in known.split() for word in words) for known in (_FOREIGN, _ENGLISH))
    return 0 < foreign >= english


def _task(message: str, earlier: str) -> tuple[str, dict[str, str]] | None:
    if _CONVERSED.search(message) is None:
        return None
    wanted = next((name for name, asks in _TASKS.items() if asks.search(message)), None)
    if wanted is None:
        return None
    match = _QUOTED.search(message) or _BEHIND.search(message)
    spoken = match[match.lastindex or 0].strip() if match else earlier.strip()
    asked_for = _USER.findall(spoken) or spoken.splitlines() or [""]
    first, last = asked_for[0].strip(), asked_for[-1].strip()
    subject = _subject(first)
    values = {
        "emoji": "\N{SLIGHTLY SMILING FACE}",
        "title": subject,
        "tags": ", ".join(dict.fromkeys(re.findall(r"\w+", subject.lower()))),
        "queries": last,
        "follow_ups": ", ".join(
            f"{asks} {_subject(last)}?" for asks in ("Where is", "Who runs", "What is the phone number of")
        ),
    }
    if wanted not in _NAMED.findall(message):
        return values[wanted], values
    is_list = wanted not in ("title", "emoji")
    listed: object = values[wanted].split(", ") if is_list and wanted != "queries" else [last]
    return json.dumps({wanted: listed if is_list else values[wanted]}, ensure_ascii=False), values


def _subject(question: str) -> str:
    """What a question is about: the longest name in it, or its first words that are no small ones."""
    rest = _ASKED.sub("", question)
    names = _NAMES.findall(rest if rest != question else question[1:])
    if names:
        return str(max(names, key=len))
    words = [word for word in re.findall(r"[\w'-]+", rest) if word.lower() not in _ENGLISH.split()]
    return " ".join(words[:4]).capitalize() or "Conversation"
