"""Questions made of a text's own sentences: a value, name or phrase is taken out, and the words around it ask for it.

Real questions with an answer are few; sentences are many. These teach to look for the place whose words are those of
the question, among other values of the same kind (after Lewis, Denoyer and Riedel 2019, "Unsupervised Question
Answering by Cloze Translation", without their translation: words are dropped and turned instead). A part of the texts
lacks the sentence, so that it does not answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from lab.training.reading.examples import Example

_MONTHS: Final = "January|February|March|April|May|June|July|August|September|October|November|December"
_UNITS: Final = (
    "%|percent|million|billion|thousand|hundred|km|cm|mm|m|kg|g|miles|feet|metres|meters|inches|acres|tonnes|years|"
    "months|weeks|days|hours|minutes|seconds|people|inhabitants|students|members|men|women|points|goals|games|times"
)
_NUMERALS: Final = "two|three|four|five|six|seven|eight|nine|ten"
# In their order: what one has found, no later one finds again.
_KINDS: Final = {
    "date": re.compile(rf"\b(?:\d{{1,2}} )?(?:{_MONTHS})\b(?: \d{{1,2}}\b,?)?(?: \d{{4}}\b)?|\b(?:1[0-9]|20)\d\d\b"),
    "money": re.compile(rf"[£$€] ?\d[\d,.]*\d(?: (?:{_UNITS}))?"),
    "number": re.compile(rf"\b\d[\d,.]*(?<=\d)(?: ?(?:{_UNITS})\b)?|\b(?:{_NUMERALS})\b"),
    "name": re.compile(r"(?<=[a-z,] )[A-Z][\w'’-]+(?: (?:(?:of|de|van|von) )?(?:the )?[A-Z][\w'’-]+){0,4}"),
    "phrase": re.compile(
        r"(?<=\b(?:the|our|its|and|for|was|are) )[a-z]{4,}(?: [a-z]{4,}){0,2}(?= (?:of|in|and|to|at|on)\b|[,.;])"
    ),
}
_ASKED: Final = {
    "date": ("When", "When", "In what year", "What year", "On which date"),
    "money": ("How much", "What price", "How much money"),
    "number": ("How many", "What number of", "How much"),
    "name": ("Who", "What", "Which", "What is the name of"),
    "phrase": ("What", "What", "Which", "What kind of"),
}
_WHERE: Final = frozenset({"in", "at", "near", "to", "from", "on"})
_SENTENCE: Final = re.compile(r"(?<=[.!?]) (?=[A-Z\"'(])")
_LEFT, _RIGHT = 9, 7  # words around the answer, at most
_DROPPED: Final = 0.15  # share of these words
_LACKING: Final = 0.18  # share of texts without the sentence
_WORDS: Final = (30, 50, 70, 90, 110)  # of a text


@dataclass(frozen=True, slots=True)
class _Value:
    kind: str
    start: int
    end: int


def sentences(text: str) -> list[str]:
    return [each.strip() for each in _SENTENCE.split(" ".join(text.split())) if each.strip()]


def values(sentence: str) -> list[_Value]:
    """Values, names and phrases of a sentence that a question can ask for; none overlaps another."""
    found: list[_Value] = []
    for kind, pattern in _KINDS.items():
        for match in pattern.finditer(sentence):
            if not any(match.start() < each.end and each.start < match.end() for each in found):
                found.append(_Value(kind, *match.span()))
    return found


def cloze(rng: random.Random, texts: Sequence[Sequence[str]]) -> Example:
    """A question about one of the texts, each given as its sentences. Some of them must hold a value."""
    while True:
        text = rng.choice(texts)
        place = rng.randrange(len(text))
        if known := values(text[place]):
            break
    kind = rng.choice(sorted({value.kind for value in known}))
    value = rng.choice([value for value in known if value.kind == kind])
    question = _question(rng, text[place], value)
    first, last = _window(rng, text, place)
    kept = list(text[first:last])
    if rng.random() < _LACKING and len(kept) > 1:
        del kept[place - first]
        return Example(question, " ".join(kept), ())
    begin = [0, *accumulate(len(each) + 1 for each in kept)][place - first]
    return Example(question, " ".join(kept), ((begin + value.start, begin + value.end),))


def _window(rng: random.Random, text: Sequence[str], place: int) -> tuple[int, int]:
    """Sentences around this one, of about so many words together."""
    room = rng.choice(_WORDS)
    first, last = place, place + 1
    while True:
        more = [(first - 1, last)] * (first > 0) + [(first, last + 1)] * (last < len(text))
        if not more:
            return first, last
        wider = rng.choice(more)
        if sum(len(each.split()) for each in text[slice(*wider)]) > room:
            return first, last
        first, last = wider


def _question(rng: random.Random, sentence: str, value: _Value) -> str:
    left, right = sentence[: value.start].split()[-_LEFT:], sentence[value.end :].split()[:_RIGHT]
    asked = rng.choice(_ASKED[value.kind])
    if left and left[-1].lower() in _WHERE:
        asked = rng.choice(("Where", "In which place", asked)) if value.kind == "name" else asked
        left = left[:-1]
    left, right = ([word for word in words if rng.random() >= _DROPPED] for words in (left, right))
    words = [*right, *left] if rng.random() < 0.4 else [*left, *right]
    if words and words[0][:1].isupper() and words[0] in ("The", "A", "An", "It", "In", "This", "He", "She", "They"):
        words[0] = words[0].lower()
    return f"{asked} {' '.join(words).strip(' .,;:')}?"
