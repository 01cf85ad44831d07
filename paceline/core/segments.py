"""The one batch type: ragged rows with parents.

Prefill is a long chain that wants its last row, decoding a chain of one, chain verification a chain that wants all
rows, a token tree sets `parents`. The engine and the scheduler know no phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

SeqId = NewType("SeqId", int)
Wanted = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows to append to one sequence's KV cache in one forward pass.

    `start` must equal the rows already cached. Raises ValueError when the tree is not one: a parent that does not
    come before its child, or no tokens at all.
    """

    seq: SeqId
    start: int  # rows already cached
    tokens: tuple[int, ...]  # (n,), n >= 1
    parents: tuple[int, ...] | None = None  # None: a chain; else parents[i] < i, -1 = the cached prefix
    logits: Wanted = "last"

    def __post_init__(self) -> None:
        if self.start < 0 or not self.tokens:
            raise ValueError(f"a segment needs tokens and a start of at least 0, got start {self.start}")
        if self.parents is not None:
            if len(self.parents) != len(self.tokens):
                raise ValueError(f"{len(self.parents)} parents for {len(self.tokens)} tokens")
            if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
                raise ValueError(f"each parent must come before its child: {self.parents}")

    def mask(self) -> NDArray[np.bool_]:
        """(n, n): may row i see row j of this segment? Cached rows are always visible."""
        n = len(self.tokens)
        if self.parents is None:
            return np.tri(n, dtype=np.bool_)
        seen = np.eye(n, dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                seen[i] |= seen[parent]  # a row sees what its parent sees, and itself
        return seen

    def positions(self) -> tuple[int, ...]:
        """(n,) absolute position of each row: cached rows plus depth in the tree."""
        if self.parents is None:
            return tuple(range(self.start, self.start + len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(self.start + depth for depth in depths)

    def wanted(self) -> tuple[int, ...]:
        """Indices of the rows whose distributions are asked for."""
        n = len(self.tokens)
        return {"all": tuple(range(n)), "last": (n - 1,), "none": ()}[self.logits]


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments of distinct sequences that run in one forward pass. Raises ValueError when a sequence occurs twice."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if len({segment.seq for segment in self.segments}) != len(self.segments):
            raise ValueError("a sequence occurs twice in one batch")

    @property
    def num_rows(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)
