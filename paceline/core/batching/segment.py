"""The one batch type: ragged rows with parents.

Prefill is a long chain that wants its last row, decoding a chain of one, chain verification a chain that wants all
rows, a token tree sets `parents`. A tree may be scored in parts: a later segment names the rows of the tree that are
cached already, and hangs its own below them. The engine and the scheduler know no phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

SeqId = NewType("SeqId", int)
LogitsMode = Literal["all", "last", "none"] | int  # a number: at most so many of the last rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows to append to one sequence's KV cache in one forward pass.

    `start` must equal the rows already cached. A tree that grows has m more parents than tokens: the first m are those
    of the sequence's open tree, whose rows, provisional, are the last m of the cache (start - m to start - 1). Only the
    engine knows whether they are: here any m up to `start` will do. Raises ValueError when the tree is not one: a
    parent that does not come before its child, fewer parents than tokens, more open rows than rows; or no tokens.
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
        """The same rows for another sequence. Once a forward: `dataclasses.replace` takes twice as long."""
        return Segment(seq, self.start, self.tokens, self.parents, self.logits)

    @property
    def num_open_rows(self) -> int:
        """m: rows of the tree that are cached already; 0 for a chain and for a tree that begins."""
        return 0 if self.parents is None else len(self.parents) - len(self.tokens)

    def mask(self) -> NDArray[np.bool_]:
        """(n, m + n): may row i of this segment see row j of the tree? The committed prefix is always visible."""
        n = len(self.tokens)
        if self.parents is None:
            return np.tri(n, dtype=np.bool_)
        seen = np.eye(len(self.parents), dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                seen[i] |= seen[parent]  # a row sees what its parent sees, and itself
        return seen[self.num_open_rows :]

    def attention_mask(self, window: int | None) -> NDArray[np.bool_]:
        """(n, start + n): may new row i see row j of the whole cache? `mask` behind the committed prefix, narrowed by a
        sliding window of so many positions, the row's own included.

        Committed rows are a chain, so row j stands at position j; the rows of a tree, those cached before included,
        stand at their depth.
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
        """(m + n,) the same with those of the open rows in front."""
        if self.parents is None:
            return tuple(range(self.start, self.start + len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(self.start - self.num_open_rows + depth for depth in depths)

    def logits_rows(self) -> tuple[int, ...]:
        """Indices of the rows whose distributions are asked for."""
        n = len(self.tokens)
        count = self.logits if isinstance(self.logits, int) else {"all": n, "last": 1, "none": 0}[self.logits]
        return tuple(range(max(0, n - count), n))


class StepSize(NamedTuple):
    """How much ran in one forward pass, of all answers together; zeros: not known."""

    rows: int = 0
    sequences: int = 0


UNKNOWN: Final = StepSize()


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
