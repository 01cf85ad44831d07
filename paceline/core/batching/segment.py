"""The one batch type: ragged rows with parents.

Prefill is a long chain with the logits of its last row, decoding a chain of one, chain verification a chain with all
logits; a token tree sets `parents`. A tree may be scored in parts: a later segment attaches its rows to those of the
tree that are cached already. The engine and the scheduler know no phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

SeqId = NewType("SeqId", int)
LogitsMode = Literal["all", "last", "none"] | int  # a number: at most this many of the last rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows to append to one sequence's KV cache in one forward pass.

    `start` must equal the rows already cached. The continuation of a tree has m more parents than tokens: the first m
    belong to the sequence's open tree, whose rows, not committed yet, are the last m of the cache (start - m to
    start - 1). Only the engine checks that; here any m up to `start` is accepted. Raises ValueError for an invalid tree
    (a parent that does not come before its child, fewer parents than tokens, more open rows than rows) or no tokens.
    """

    seq: SeqId
    start: int  # rows already cached, those of the open tree included
    tokens: tuple[int, ...]  # (n,), n >= 1
    # None: a chain; else (m + n,) a tree, open rows first: parents[i] < i, -1 = the committed prefix
    parents: tuple[int, ...] | None = None
    logits: LogitsMode = "last"

    def __post_init__(self) -> None:
        if self.start < 0 or not self.tokens:
            raise ValueError(f"a segment needs tokens and a start of at least 0, got start {self.start}")
        if self.parents is not None:
            if not 0 <= self.num_open_rows <= self.start:
                raise ValueError(f"{len(self.parents)} parents for {len(self.tokens)} tokens behind {self.start} rows")
            if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
                raise ValueError(f"each parent must come before its child: {self.parents}")

    def with_seq(self, seq: SeqId) -> Segment:
        """The same rows for another sequence. On the hot path: `dataclasses.replace` takes twice as long."""
        return Segment(seq, self.start, self.tokens, self.parents, self.logits)

    @property
    def num_open_rows(self) -> int:
        """m: rows of the tree that are cached already; 0 for a chain and for a new tree."""
        return 0 if self.parents is None else len(self.parents) - len(self.tokens)

    def mask(self) -> NDArray[np.bool_]:
        """(n, m + n): True if row i of this segment attends to row j of the tree. The committed prefix is always
        visible."""
        n = len(self.tokens)
        if self.parents is None:
            return np.tri(n, dtype=np.bool_)
        seen = np.eye(len(self.parents), dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                seen[i] |= seen[parent]  # a row sees what its parent sees, and itself
        return seen[self.num_open_rows :]

    def attention_mask(self, window: int | None) -> NDArray[np.bool_]:
        """(n, start + n): True if new row i attends to row j of the whole cache. Committed prefix and `mask`, narrowed
        by a sliding window of `window` positions, the row's own included.

        Committed rows are a chain, so row j has position j; the position of a tree's row, cached or new, follows from
        its depth.
        """
        n, committed = len(self.tokens), self.start - self.num_open_rows
        seen = np.ones((n, self.start + n), dtype=np.bool_)
        seen[:, committed:] = self.mask()
        if window is not None:
            positions = np.asarray(self.positions())
            columns = np.concatenate((np.arange(committed), self.tree_positions()))
            seen &= positions[:, None] - columns[None, :] < window
        return seen

    def positions(self) -> tuple[int, ...]:
        """(n,) absolute position of each row: committed rows plus depth in the tree."""
        return self.tree_positions()[self.num_open_rows :]

    def tree_positions(self) -> tuple[int, ...]:
        """(m + n,) absolute positions of the open rows and of this segment's."""
        if self.parents is None:
            return tuple(range(self.start, self.start + len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(self.start - self.num_open_rows + depth for depth in depths)

    def logits_rows(self) -> tuple[int, ...]:
        """Indices of the rows whose distributions are requested."""
        n = len(self.tokens)
        count = self.logits if isinstance(self.logits, int) else {"all": n, "last": 1, "none": 0}[self.logits]
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
