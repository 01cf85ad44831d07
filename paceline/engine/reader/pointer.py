"""The encoder's pass over a question and a document: where the answer stands, and whether there is one.

Two scores of each of the document's tokens, of being an answer's first and its last (Devlin et al. 2019, section 4.3);
the first token of the input stands for "no answer". A long document is read in windows that overlap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.sampling.dist import best_indices
from paceline.core.words import folded
from paceline.encoder import CLS, SEP, Floats, outputs
from paceline.engine.reader.shape import MISFIT, completed, cuts, misfits, with_dates_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HEADS = "heads"  # (2, WIDTH)
MAX_QUESTION = 64  # tokens
MAX_INPUT = 256  # as in training
_STRIDE = 96
_LONGEST_SPAN = 24  # tokens
_CANDIDATES = 120  # spans of a window, before their shape counts
_KEPT = 24  # of them
_MARKS = " \t\r\n.,;:!?*_|\"'()[]#-"  # not at the edges of an answer
_WORD = re.compile(r"\w+")
_STEM = 5  # letters that tell a word from others
_COMMON_WORDS = (
    "a an the of in on at to for from by with and or is are was were be been do does did can could will would should "
    "may must has have had i we you he she it they my our your his her its their me us what when where who whom whose "
    "which why how much many long often far old that this there one as if not no any all some get got up out per than "
    "then so please tell"
)
_COMMON = frozenset(_WORD.findall(_COMMON_WORDS))
_SENTENCES = re.compile(r"(?<![A-Z])(?<!\b[A-Z][a-z])[.!?]\s+[A-Z0-9]")  # not behind "Dr." or an initial
_CUT = (";", "\n", "\r", "|")  # where an answer ends: between the lines of a list, and where parts of an answer meet


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


class Pointer:
    """A function of question and document alone: nothing is batched, so no other reading changes a bit of it. It keeps
    none: a text that another owner has had read takes as long as any."""

    def __init__(self, weights: Mapping[str, Floats], tokenizer: Tokenizer, calibration: SpanCalibration) -> None:
        self._weights = weights
        self.num_weights = sum(weight.size for weight in weights.values())
        self._tokenizer = tokenizer
        self._calibration = calibration

    def read(self, question: str, document: str) -> SpanReading:
        question = with_dates_of(document, question)
        asked = self._tokenizer.encode(question, add_special_tokens=False).ids[:MAX_QUESTION]
        read = self._tokenizer.encode(document, add_special_tokens=False)
        head = [CLS, *asked, SEP]
        room = MAX_INPUT - len(head) - 1
        odds: dict[str, float] = {}  # text → log of the summed odds of its places against no answer
        best = -math.inf
        start = 0
        while start < len(read.ids):
            window = slice(start, start + room)
            found = self._spans(question, head, read.ids[window], read.offsets[window], document)
            for text, score in found:
                odds[text] = _log_sum((odds.get(text, -math.inf), score))
            best = max(best, _log_sum([score for _, score in found]))
            if start + room >= len(read.ids):
                break
            start += _STRIDE
        if not odds:
            return SpanReading(0.0, ())
        calibration = self._calibration
        sure = calibration.slope * (best + calibration.words * shared_words(question, document) - calibration.middle)
        answered = 1 / (1 + math.exp(-max(-50.0, min(50.0, sure))))
        kept = sorted(odds.items(), key=lambda each: (-each[1], each[0]))[:_KEPT]
        total = _log_sum([score for _, score in kept])
        return SpanReading(answered, tuple((text, math.exp(score - total)) for text, score in kept))

    def _spans(
        self, question: str, head: list[int], ids: list[int], offsets: Sequence[tuple[int, int]], document: str
    ) -> list[tuple[str, float]]:
        """The best spans of a window: their texts, and their scores less that of no answer and less what their shape
        costs; a text may come more than once."""
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
            text = _answer(document, offsets[a][0], offsets[b][1])
            if text and score > -math.inf:
                found.append((text, score - MISFIT * misfits(question, text)))
        return sorted(found, key=lambda each: -each[1])[:_KEPT]


def shared_words(question: str, document: str) -> float:
    """Share of the question's words that the document holds, by their first letters; 0 for a question without words.

    The encoder alone takes the nearest thing of the right kind for an answer: a fitter's name for a landlady's.
    """
    asked = words_in(question)
    held = {word[:_STEM] for word in _WORD.findall(folded(document))}
    return sum(word[:_STEM] in held for word in asked) / len(asked) if asked else 0.0


def words_in(text: str) -> list[str]:
    """The words of a text that tell it from others, in small letters."""
    return [word for word in _WORD.findall(folded(text)) if word not in _COMMON]


def _answer(document: str, begin: int, end: int) -> str:
    """The text of a span with what belongs to it; "" for one that is no answer: see `shape.cuts` and `_trimmed`."""
    if cuts(document, begin, end) or not (text := _trimmed(document[begin:end])):
        return ""
    begin = document.index(text, begin)
    begin, end = completed(document, begin, begin + len(text))
    return _trimmed(document[begin:end]) or text


def _trimmed(text: str) -> str:
    """Without marks around it; "" for a span over several lines or sentences."""
    text = text.strip(_MARKS)
    return "" if any(mark in text for mark in _CUT) or _SENTENCES.search(text) else text


def _log_sum(values: Sequence[float]) -> float:
    top = max(values, default=-math.inf)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in values))
