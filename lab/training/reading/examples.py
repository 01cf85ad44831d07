"""One training example of the reader, and its token ids: question and document in one input. Many in one file."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from paceline.encoder import CLS, SEP
from paceline.engine.reader.pointer import MAX_INPUT, MAX_QUESTION, with_line_marks

Span = tuple[int, int]
Ints = NDArray[np.int64]
_MARKS: Final = " \t\n.,;:!?()[]\"'"


@dataclass(frozen=True, slots=True)
class Example:
    """A question about a document; `spans`: where its answers stand (characters), none if it does not answer.

    A question for two facts has the spans of those that the document states.
    """

    question: str
    document: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, the index of the document's first token, and the pairs (first, last) of the answers' tokens."""

    ids: list[int]
    document: int
    answers: tuple[Span, ...]


def occurrences(document: str, answer: str) -> tuple[Span, ...]:
    """Where the answer stands in the document as whole words, without marks around it."""
    text = answer.strip(_MARKS)
    found = re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", document, re.IGNORECASE) if text else ()
    return tuple(match.span() for match in found)


def about(question: str, document: str, answers: Sequence[str]) -> Example | None:
    """The example whose answer is the shortest that the document holds; None when it holds none of them."""
    for answer in sorted(answers, key=len):
        if spans := occurrences(document, answer):
            return Example(question, document, spans)
    return None


def encode(tokenizer: Tokenizer, example: Example) -> Encoded:
    """Cut to MAX_INPUT tokens; an answer beyond the cut does not count."""
    asked = tokenizer.encode(example.question, add_special_tokens=False).ids[:MAX_QUESTION]
    head = [CLS, *asked, SEP]
    read = tokenizer.encode(with_line_marks(example.document), add_special_tokens=False)
    room = MAX_INPUT - len(head) - 1
    offsets = read.offsets[:room]
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    answers = []
    for start, end in example.spans:
        first, last = bisect.bisect_right(starts, start) - 1, bisect.bisect_left(ends, end)
        if 0 <= first <= last < len(offsets):
            answers.append((len(head) + first, len(head) + last))
    return Encoded([*head, *read.ids[:room], SEP], len(head), tuple(answers))


@dataclass(frozen=True, slots=True)
class Encodings:
    """Encoded examples in flat arrays; those of one question are one group."""

    ids: NDArray[np.uint16]
    lengths: Ints  # of the inputs
    documents: Ints
    counts: Ints  # of answers
    answers: Ints  # (all answers, 2)
    groups: Ints

    @staticmethod
    def of(questions: Iterable[Sequence[Encoded]]) -> Encodings:
        found = [(each, group) for group, examples in enumerate(questions) for each in examples]
        return Encodings(
            np.concatenate([np.array(each.ids, np.uint16) for each, _ in found]),
            np.array([len(each.ids) for each, _ in found]),
            np.array([each.document for each, _ in found]),
            np.array([len(each.answers) for each, _ in found]),
            np.array([pair for each, _ in found for pair in each.answers], np.int64).reshape(-1, 2),
            np.array([group for _, group in found]),
        )

    @staticmethod
    def load(file: Path) -> Encodings:
        with np.load(file) as kept:
            return Encodings(*(kept[name] for name in Encodings.__slots__))

    def save(self, file: Path) -> None:
        np.savez_compressed(file, **{name: getattr(self, name) for name in Encodings.__slots__})

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Ints) -> tuple[Ints, Ints]:
        """(rows, longest) token ids, and (rows, most answers, 2) answers: what points at no answer where there is none;
        -1 beyond a row's last one."""
        starts, firsts = np.cumsum(self.lengths) - self.lengths, np.cumsum(self.counts) - self.counts
        ids = np.zeros((len(rows), int(self.lengths[rows].max())), np.int64)
        answers = np.full((len(rows), max(1, int(self.counts[rows].max())), 2), -1)
        for at, row in enumerate(rows.tolist()):
            ids[at, : self.lengths[row]] = self.ids[starts[row] : starts[row] + self.lengths[row]]
            answers[at, : self.counts[row]] = self.answers[firsts[row] : firsts[row] + self.counts[row]]
            if not self.counts[row]:
                answers[at, 0] = 0
        return ids, answers
