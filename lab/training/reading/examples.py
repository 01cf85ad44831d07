"""One training example of the reader, and its token ids: question and document in one input."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from tokenizers import Tokenizer

from paceline.encoder import CLS, SEP

MAX_QUESTION: Final = 64  # tokens
MAX_INPUT: Final = 256  # of question, document and three special tokens
_MARKS: Final = " \t\n.,;:!?()[]\"'"


@dataclass(frozen=True, slots=True)
class Example:
    """A question about a document; `spans`: where its answers stand (characters), none if it does not answer.

    A question for two facts has the spans of those that the document states.
    """

    question: str
    document: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, the index of the document's first token, and the pairs (first, last) of the answers' tokens."""

    ids: list[int]
    document: int
    answers: tuple[tuple[int, int], ...]


def occurrences(document: str, answer: str) -> tuple[tuple[int, int], ...]:
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
    read = tokenizer.encode(example.document, add_special_tokens=False)
    room = MAX_INPUT - len(head) - 1
    offsets = read.offsets[:room]
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    answers = []
    for start, end in example.spans:
        first, last = bisect.bisect_right(starts, start) - 1, bisect.bisect_left(ends, end)
        if 0 <= first <= last < len(offsets):
            answers.append((len(head) + first, len(head) + last))
    return Encoded([*head, *read.ids[:room], SEP], len(head), tuple(answers))


def batches(examples: Sequence[Encoded], tokens: int) -> list[list[Encoded]]:
    """Grouped by length, so that a padded batch holds at most `tokens`."""
    grouped: list[list[Encoded]] = []
    for _, group in groupby(sorted(examples, key=lambda each: len(each.ids)), key=lambda each: len(each.ids) // 8):
        for example in group:
            if not grouped or (len(grouped[-1]) + 1) * len(example.ids) > tokens:
                grouped.append([])
            grouped[-1].append(example)
    return grouped
