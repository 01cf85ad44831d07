"""The one batch type: ragged rows with parents.

Prefill is a long chain with the logits of its last row, decoding a chain of one, chain verification a chain with all
logits; a token tree names its rows, and sets `parents`. A tree may be scored in parts: a later segment names rows of
earlier ones as parents. The engine and the scheduler know no phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, NewType

import msgspec

SeqId = NewType("SeqId", int)
LogitsMode = Literal["all", "last", "none"] | int  # a number: at most this many of the last rows
ROOT: Final = -1  # parent of the rows that follow the committed prefix


class Segment(msgspec.Struct, frozen=True):
    """Rows to append to one sequence's KV cache in one forward pass.

    A chain is committed as it is written. The rows of a tree are provisional: their ids name them, in segments that
    grow the tree and when it is pruned. Ids rise within a tree, over all its segments. Raises ValueError for no tokens,
    ids that do not rise, or a parent whose id is not below its child's.
    """

    seq: SeqId
    start: int  # rows already cached as the sender counts them, those of the open tree included
    tokens: tuple[int, ...]  # (n,), n >= 1
    parents: tuple[int, ...] | None = None  # None: a chain; else (n,) ids of the rows' parents, or `ROOT`
    logits: LogitsMode = "last"
    ids: tuple[int, ...] | None = None  # (n,) of a tree; None: 0 to n - 1

    def __post_init__(self) -> None:
        if self.start < 0 or not self.tokens:
            raise ValueError(f"a segment needs tokens and a start of at least 0, got start {self.start}")
        if self.parents is None:
            if self.ids is not None:
                raise ValueError("rows of a chain have no ids")
            return
        ids = self.node_ids
        if not len(self.parents) == len(ids) == len(self.tokens):
            raise ValueError(f"{len(self.parents)} parents and {len(ids)} ids for {len(self.tokens)} tokens")
        if ids[0] < 0 or any(a >= b for a, b in pairwise(ids)):
            raise ValueError(f"ids must rise from at least 0: {ids}")
        if any(not ROOT <= parent < own for parent, own in zip(self.parents, ids, strict=True)):
            raise ValueError(f"each parent must come before its child: {self.parents} of {ids}")

    @property
    def node_ids(self) -> Sequence[int]:
        """(n,) of a tree"""
        return range(len(self.tokens)) if self.ids is None else self.ids

    def with_seq(self, seq: SeqId) -> Segment:
        """The same rows for another sequence. They are not checked again."""
        renamed = copy(self)
        msgspec.structs.force_setattr(renamed, "seq", seq)
        return renamed

    def logits_rows(self) -> tuple[int, ...]:
        """Indices of the rows whose distributions are requested."""
        n = len(self.tokens)
        if self.logits == "last":
            return (n - 1,)
        count = self.logits if isinstance(self.logits, int) else {"all": n, "none": 0}[self.logits]
        return tuple(range(max(0, n - count), n))


class StepSize(NamedTuple):
    """Size of one forward pass, over all requests; zeros: unknown."""

    rows: int = 0
    sequences: int = 0


UNKNOWN: Final = StepSize()


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments of distinct sequences that run in one forward pass. Raises ValueError if a sequence occurs twice."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if len({segment.seq for segment in self.segments}) != len(self.segments):
            raise ValueError("a sequence occurs twice in one batch")

    @property
    def num_rows(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)
