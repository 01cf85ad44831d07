"""The encoder's pass over a question and a document: where the answer stands, and whether there is one; before it, what
shape an answer has that a question asks for.

Two scores of each of the document's tokens, of being an answer's first and its last (Devlin et al. 2019, section 4.3);
the first token of the input stands for "no answer". A long document is read in windows that overlap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.sampling.dist import best_indices
from paceline.encoder import CLS, SEP, Floats, outputs
from paceline.engine.reader.place import ASKS_MONEY, NUMERALS, SENTENCE_END, Places, shared_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ---- the shape of an answer: what a question's first words ask for, and where the edges of an answer belong ----------
# The encoder was trained on some thousands of questions and now and then takes the value that stands nearest: a breed
# for a vet's name, a half of a number. What "who", "when" and "how much" ask for, and where a word or number ends,
# needs no training; nor does a date that is written otherwise in the document. Rules for English, not a model; what no
# rule knows has any shape. Not handled: reasons, and whether a number is of the right unit but for money.
MISFIT = 4.0  # what it takes off a span's log odds, that it has not the shape asked for
_TIMES = (
    r"january|february|march|april|may|june|july|august|september|october|november|december|monday|tuesday|wednesday|"
    r"thursday|friday|saturday|sunday|noon|midday|midnight|morning|afternoon|evening|night|dusk|dawn|sunrise|sunset|"
    r"spring|summer|autumn|winter|easter|christmas|today|tomorrow|yesterday|tonight|weekend|week|month|year|day|hour|"
    r"o'clock|half past|term|now|daily|weekly|monthly|yearly"
)
_AMOUNTS = r"half|quarter|third|once|twice|free|every|an?|no|none|nothing|both|several|all|few|always|never"
_BEFORE = (
    r"^(?:(?:about|after|around|at|before|by|during|for|from|in|of|on|since|till|to|until|up to|with|within)\s){0,2}"
)
_NO_MONEY = re.compile(r"(?!\W*[\d.,]+\s?(?:[kMG]?Wh?|[cmk]?m|k?g|m?l|m[23²³]|litres?|metres?|kilomet\w+|°C)(?!\w))")
_SHAPES = tuple(  # what a question asks by, and the shape of its answers; the first that asks decides
    (re.compile(asks, re.IGNORECASE), shape)
    for asks, shape in (
        (r"\be-?mail address", re.compile("@")),
        (r"\b(?:tele)?phone number", re.compile(r"\d(?:[\s/()+-]*\d){3}")),
        (
            rf"{_BEFORE}(?:when\b|(?:what|which)\s(?:time|date|days?|month|year|evening|morning|nights?|week)\b)",
            re.compile(rf"\d|\b(?:{_TIMES})s?\b", re.IGNORECASE),
        ),
        (rf"{_BEFORE}where\b", re.compile(r"[^\W\d_]|^\W*\d{1,4}\W*$")),
        (
            rf"{_BEFORE}how\s(?:much|many|long|far|high|tall|deep|old|heavy|often|big|large|fast|loud|wide|late|early|"
            r"hot|warm|cold|soon)\b|^what\s(?:do|does|did|would|will)\b.*\bcost\b"
            r"|^what\s(?:is|was|are|were)\sthe\s(?:[\w-]+\s){0,2}(?:price|cost|fee|rent|deposit|charge|fine)\b",
            re.compile(rf"\d|\b(?:{NUMERALS}|{_AMOUNTS})\b|\b(?:{_TIMES})s?\b", re.IGNORECASE),
        ),
        (rf"{_BEFORE}(?:who|whom|whose)\b|^what\b.*\b(?:sur)?name of\b", re.compile(r"[^\W\d_a-z]")),  # a capital
    )
)
_UNIT = re.compile(
    r"\s?(?:%|percent|°C|bar|k?m|[cm]m|[km]?g|m?l|k?W|[GM]B|dB|litres?|miles?|feet|euros?|cents?|pounds?|dollars?|"
    r"degrees|minutes?|hours?|days?|weeks?|months?|years?|am|pm|o'clock|kilos?)(?!\w)"
)
_BELONGING = re.compile(
    r"(?:\b(?:the )?(?:end|beginning|start|middle) of (?:the )?|\b(?:half past|quarter past|quarter to) "
    r"|\b(?:Dr|Mr|Mrs|Ms|Miss|Prof|Professor|Captain|Capt|Sir|Lady|Lord|Dame|Colonel|Major|General|Sergeant|Inspector"
    r"|Reverend|Rev|Father|Sister|Brother|Aunt|Uncle|King|Queen|Prince|Princess|President|Mayor|Judge|Saint|St)\.? )$"
)
_HYPHENED = re.compile(r"(?:-\w{1,30}){1,4}")
_NUMBERED = re.compile(r"(?:-[A-Z0-9]\w{0,30}){1,4}")  # behind a digit: of a part's number, but not of "4-year"
_LAST_WORD = re.compile(r"[\w-]{0,124}$")
_NAME_BEGUN = re.compile(r"(?<!\w)[^\W\d_a-z][\w-]{0,124}$")  # not "Anna's"
_REST_OF_NAME = re.compile(r"(?: (?:& )?[^\W\d_a-z][\w'\u2019-]{1,60}){1,6}")
_HYPHENED_BEFORE = re.compile(r"(?<!\w)(?:[^\W\d_]{1,30}-){1,4}$")
_LONGEST_WORD = 124  # characters
_LONGEST_BELONGING = 24  # characters
_LONGEST_DATE = 10  # characters


def misfits(question: str, text: str) -> bool:
    """True where the question's words ask for a shape that the text does not have."""
    if ASKS_MONEY.search(question) and _NO_MONEY.match(text) is None:
        return True
    return next((not shape.search(text) for asked, shape in _SHAPES if asked.search(question)), False)


def cuts(document: str, begin: int, end: int) -> bool:
    """True if an edge of this part of the document lies inside a word or a number."""
    return any(_is_inside(document, edge) or _is_in_date(document, edge) for edge in (begin, end))


def completed(document: str, begin: int, end: int) -> tuple[int, int]:
    """The part with what belongs to it: the rest of a word with hyphens and of a name, the unit behind a number, "end
    of" before a month, a person's title."""
    rest = (_HYPHENED if document[end - 1 : end].isalpha() else _NUMBERED).match(document, end)
    if rest and any(map(str.isalpha, _LAST_WORD.findall(document[begin:end])[0] + rest[0])):
        end = rest.end()
    if _NAME_BEGUN.search(document[begin:end]) and (rest := _REST_OF_NAME.match(document, end)):
        end = rest.end()
    if document[begin : begin + 1].isalnum() and (rest := _HYPHENED_BEFORE.search(document[:begin][-_LONGEST_WORD:])):
        begin -= len(rest[0])
    if document[end - 1 : end].isdigit() and (unit := _UNIT.match(document, end)):
        end = unit.end()
    if before := _BELONGING.search(document[max(0, begin - _LONGEST_BELONGING) : begin]):
        begin -= len(before[0])
    return begin, end


def _is_in_date(document: str, edge: int) -> bool:
    near = max(0, edge - _LONGEST_DATE)
    found = (match for date in (_ISO, _DOTTED) for match in date.finditer(document, near, edge + _LONGEST_DATE))
    return any(match.start() < edge < match.end() for match in found)


def _is_inside(document: str, edge: int) -> bool:
    left, right = document[max(0, edge - 2) : edge], document[edge : edge + 2]
    if not left or not right:
        return False
    if left[-1].isalnum() and right[0].isalnum():
        return True
    for before, mark, after in ((left[-1], right[0], right[1:]), (left[:-1], left[-1], right[0])):
        in_number = mark in ".,:/" and before.isdigit() and after.isdigit()
        if in_number or (mark in ".@_" and before.isalnum() and after.isalnum()):  # of a file's name or an address
            return True
    return False


# ---- dates ----------------------------------------------------------------------------------------------------------
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = r"(?P<name>jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_DAY_MONTH = re.compile(rf"\b{_DAY}(?: of)? {_MONTH}(?:,? (?P<year>\d{{4}}))?\b", re.IGNORECASE)
_MONTH_DAY = re.compile(rf"\b{_MONTH} {_DAY}(?:,? (?P<year>\d{{4}}))?\b", re.IGNORECASE)
_ISO = re.compile(r"\b(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})(?!\d)")
_DOTTED = re.compile(r"\b(?P<day>\d{1,2})[./](?P<month>\d{1,2})[./](?P<year>\d{4})\b")


def with_dates_of(document: str, question: str) -> str:
    """The question, with each date in the document's writing: "2025-10-29" for "29 October" where that stands there."""
    for text, (year, month, day) in _dates(question):
        if text.lower() in document.lower():
            continue
        for other, (its_year, *its_day) in _dates(document):
            if its_day == [month, day] and (year == its_year or not year or not its_year):
                question = question.replace(text, other, 1)
                break
    return question


def _dates(text: str) -> list[tuple[str, tuple[int, int, int]]]:
    """Dates as they are written, and year (0: none), month and day."""
    found = []
    for pattern in (_ISO, _DOTTED, _DAY_MONTH, _MONTH_DAY):
        for match in pattern.finditer(text):
            parts = match.groupdict()
            month = _MONTHS.index(parts["name"].lower()) + 1 if "name" in parts else int(parts["month"])
            found.append((match[0], (int(parts["year"] or 0), month, int(parts["day"]))))
    return found


# ---- a share of a sum -----------------------------------------------------------------------------------------------
_OF_A_SUM = re.compile(
    r"^(how\smuch\sof)\sthe\s(?:costs?|price|fees?|bill|sum|amount|total)\s(?:of|for)\b", re.IGNORECASE
)


def plainly(question: str) -> str:
    """The question without "the cost of" where a share of it is asked for: else the whole is taken, which is named."""
    return _OF_A_SUM.sub(r"\1", question)


HEADS = "heads"  # (2, WIDTH)
MAX_QUESTION = 64  # tokens
# ---- the encoder's pass: spans and their probabilities ---------------------------------------------------------------
MAX_INPUT = 256  # as in training
_STRIDE = 96
_LONGEST_SPAN = 24  # tokens
_CANDIDATES = 120  # spans of a window, before their shape counts
_KEPT = 24  # of them
_MARKS = " \t\r\n.,;:!?*_|\"'()[]#-"  # not at the edges of an answer
_LEAD = re.compile(r"^(?:(?:at|by|for|from|in|of|on|to)\s)?(?:(?:the|an?|my|our|his|her)\s)?(?=\w)", re.IGNORECASE)
_CUT = (";", "\n", "\r", "|", "  ", "\t")  # where an answer ends: between lines, columns and parts of an answer


@dataclass(frozen=True, slots=True)
class SpanCalibration:
    """How sure an answer must be: sigmoid(slope * (x + words * s - middle)), where x is the log odds of the best spans
    against none, and s the share of the question's words that the document holds."""

    middle: float = 0.0
    slope: float = 1.0
    words: float = 0.0


@dataclass(frozen=True, slots=True)
class SpanReading:
    """answered: probability that the document answers. spans: texts and their probabilities if so, which sum to 1."""

    answered: float
    spans: tuple[tuple[str, float], ...]


class _Span(NamedTuple):
    begin: int  # in the document
    text: str
    score: float  # less that of no answer, and less what its shape costs


class Pointer:
    """A function of question and document alone: nothing is batched, so no other reading changes a bit of it. It keeps
    none: a text that another owner has had read takes as long as any."""

    def __init__(self, weights: Mapping[str, Floats], tokenizer: Tokenizer, calibration: SpanCalibration) -> None:
        self._weights = weights
        self.num_weights = sum(weight.size for weight in weights.values())
        self._tokenizer = tokenizer
        self._calibration = calibration

    def read(self, question: str, document: str) -> SpanReading:
        question = plainly(with_dates_of(document, question))
        asked = self._tokenizer.encode(question, add_special_tokens=False).ids[:MAX_QUESTION]
        read = self._tokenizer.encode(document, add_special_tokens=False)
        head = [CLS, *asked, SEP]
        room = MAX_INPUT - len(head) - 1
        spans: list[_Span] = []
        best = -math.inf
        start = 0
        while start < len(read.ids):
            window = slice(start, start + room)
            found = self._spans(question, head, read.ids[window], read.offsets[window], document)
            spans += found
            best = max(best, _log_sum([span.score for span in found]))
            if start + room >= len(read.ids):
                break
            start += _STRIDE
        if not spans:
            return SpanReading(0.0, ())
        odds: dict[str, float] = {}  # of an answer: log of the summed odds of its texts and places against no answer
        texts: dict[str, tuple[float, str]] = {}  # the best of its texts, as "the pier" and "at the pier"
        costs = Places(question, document).costs([(span.begin, span.begin + len(span.text)) for span in spans])
        for span, cost in zip(spans, costs, strict=True):
            said, score = _LEAD.sub("", span.text), span.score - cost
            odds[said] = _log_sum((odds.get(said, -math.inf), score))
            texts[said] = max(texts.get(said, (-math.inf, "")), (score, span.text))
        calibration = self._calibration
        sure = calibration.slope * (best + calibration.words * shared_words(question, document) - calibration.middle)
        answered = 1 / (1 + math.exp(-max(-50.0, min(50.0, sure))))
        kept = sorted(odds.items(), key=lambda each: (-each[1], each[0]))[:_KEPT]
        total = _log_sum([score for _, score in kept])
        return SpanReading(answered, tuple((texts[said][1], math.exp(score - total)) for said, score in kept))

    def _spans(
        self, question: str, head: list[int], ids: list[int], offsets: Sequence[tuple[int, int]], document: str
    ) -> list[_Span]:
        """The best spans of a window; a text may come more than once."""
        types = [0] * len(head) + [1] * (len(ids) + 1)
        hidden = outputs(self._weights, [[*head, *ids, SEP]], [types])
        first, last = (hidden @ self._weights[HEADS].T).astype(np.float64).T
        begin, end = len(head), len(head) + len(ids)
        pairs = first[begin:end, None] + last[None, begin:end] - (first[0] + last[0])
        length = np.arange(len(ids))[None, :] - np.arange(len(ids))[:, None]
        pairs = np.where((length >= 0) & (length < _LONGEST_SPAN), pairs, -np.inf).ravel()
        places = best_indices(pairs, _CANDIDATES)
        found = []
        for score, place in zip(pairs[places].tolist(), places.tolist(), strict=True):
            a, b = divmod(place, len(ids))
            at, text = _answer(document, offsets[a][0], offsets[b][1])
            if text and score > -math.inf:
                found.append(_Span(at, text, score - MISFIT * misfits(question, text)))
        return found


def _answer(document: str, begin: int, end: int) -> tuple[int, str]:
    """Begin and text of a span with what belongs to it; "" for one that is no answer: see `cuts` and `_trimmed`."""
    if cuts(document, begin, end) or not (text := _trimmed(document[begin:end])):
        return begin, ""
    begin = document.index(text, begin)
    whole = slice(*completed(document, begin, begin + len(text)))
    if longer := _trimmed(document[whole]):
        return document.index(longer, whole.start), longer
    return begin, text


def _trimmed(text: str) -> str:
    """Without marks around it; "" for a span over several lines or sentences."""
    text = text.strip(_MARKS)
    return "" if any(mark in text for mark in _CUT) or SENTENCE_END.search(text) else text


def _log_sum(values: Sequence[float]) -> float:
    top = max(values, default=-math.inf)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in values))
