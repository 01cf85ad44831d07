"""The encoder's pass over a question and a document: where the answer stands, and whether there is one.

Two scores of each of the document's tokens, of being an answer's first and its last (Devlin et al. 2019, section 4.3);
the first token of the input stands for "no answer". A long document is read in windows that overlap.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.sampling.dist import best_indices
from paceline.encoder import CLS, SEP, Floats, outputs
from paceline.engine.reader.place import SENTENCE_END, Places, shared_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HEADS = "heads"  # (2, WIDTH)
MAX_QUESTION = 64  # tokens
MAX_INPUT = 256  # as in training
_STRIDE = 96
_LONGEST_SPAN = 24  # tokens
_CANDIDATES = 120  # spans of a window, as places
_KEPT = 24  # of them, as texts
_MARKS = " \t\r\n.,;:!?*_|\"'()[]#-"  # not at the edges of an answer
_SIGN = re.compile(r"(?<![\w-])--?$")
_LEAD = re.compile(r"^(?:(?:at|by|for|from|in|of|on|to)\s)?(?:(?:the|an?|my|our|his|her)\s)?(?=\w)", re.IGNORECASE)
_DATE = re.compile(r"\b\d{4}-\d\d?-\d\d?\b")
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
    score: float  # less that of no answer


_LINE_END = re.compile(r"\n\s*+")


def with_line_marks(document: str) -> str:
    """The document, of the same length, with a bar at each line's end: the encoder's tokenizer drops what is blank, and
    a list without its lines reads as if each thing belonged to the name behind it."""
    return _LINE_END.sub(lambda blank: "|".ljust(len(blank[0])), document)


class Pointer:
    """A function of question and document alone: nothing is batched, so no other reading changes a bit of it. It keeps
    none: a text that another owner has had read takes as long as any."""

    def __init__(self, weights: Mapping[str, Floats], tokenizer: Tokenizer, calibration: SpanCalibration) -> None:
        self._weights = weights
        self.num_weights = sum(weight.size for weight in weights.values())
        self._tokenizer = tokenizer
        self._calibration = calibration

    def read(self, question: str, document: str) -> SpanReading:
        asked = self._tokenizer.encode(question, add_special_tokens=False).ids[:MAX_QUESTION]
        read = self._tokenizer.encode(with_line_marks(document), add_special_tokens=False)
        head = [CLS, *asked, SEP]
        room = MAX_INPUT - len(head) - 1
        spans: list[_Span] = []
        best = -math.inf
        start = 0
        while start < len(read.ids):
            window = slice(start, start + room)
            found = self._spans(head, read.ids[window], read.offsets[window], document)
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

    def _spans(self, head: list[int], ids: list[int], offsets: Sequence[tuple[int, int]], document: str) -> list[_Span]:
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
            begin, text = _answer(document, offsets[a][0], offsets[b][1])
            if text and score > -math.inf:
                found.append(_Span(begin, text, score))
        return found


def _answer(document: str, begin: int, end: int) -> tuple[int, str]:
    """The span without marks around it, and where it begins; "" for one over several lines or sentences, and for one
    that cuts a word or what else belongs together."""
    while end < len(document) and unicodedata.combining(document[end]):
        end += 1
    is_cut = any(_is_inside(document, edge) for edge in (begin, end))
    begin += len(document[begin:end]) - len(document[begin:end].lstrip(_MARKS))
    end = begin + len(document[begin:end].rstrip(_MARKS))
    sign = _SIGN.search(document, max(0, begin - 3), begin)  # "-4", "--force", "C#"
    if sign is not None and (document[begin : begin + 1].isdigit() or len(sign[0]) > 1):
        begin = sign.start()
    end += document[end : end + 1] == "#" and document[end - 1].isalpha()
    text = document[begin:end]
    return begin, "" if is_cut or any(mark in text for mark in _CUT) or SENTENCE_END.search(text) else text


def _is_inside(document: str, edge: int) -> bool:
    """True within a word, a number, a date such as 2025-03-14, a file's name or an address."""
    if any(date.start() < edge < date.end() for date in _DATE.finditer(document, max(0, edge - 10), edge + 10)):
        return True
    left, right = document[max(0, edge - 2) : edge], document[edge : edge + 2]
    if not left or not right:
        return False
    if left[-1].isalnum() and right[0].isalnum():
        return True
    for before, mark, after in ((left[-1], right[0], right[1:]), (left[:-1], left[-1], right[0])):
        in_number = mark in ".,:/" and before.isdigit() and after.isdigit()
        of_a_part = mark == "-" and before.isdigit() and after.isupper()  # 5520-K
        if in_number or of_a_part or (mark in ".@_" and before.isalnum() and after.isalnum()):
            return True
    return False


def _log_sum(values: Sequence[float]) -> float:
    top = max(values, default=-math.inf)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in values))
