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
import numpy as np
from numpy.typing import NDArray

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


class GoesOn(msgspec.Struct, frozen=True):
    """Says of a forward that one of the sampled token alone follows, which an engine may begin unasked: unless the
    token is one of `ends`, or its output position the last below `length`."""

    length: int
    ends: frozenset[int]
    always: bool = True  # all forwards of the answer do; else it is known of this one alone


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


# Where the rows of a segment go: the segment as an engine runs it, once its sequence is known.


class PlacedSegment(msgspec.Struct, frozen=True):
    """Rows behind those that their sequence has, without the rows that a prune had dropped before they came.

    A tree is described as a whole: first its m open rows, which are the last m of the cache (start - m to start - 1),
    then the n new ones. Made by `engine.sequence_table.SequenceTable`, which checks it.
    """

    seq: SeqId
    start: int  # rows cached
    tokens: tuple[int, ...]  # (n,), n >= 0
    parents: tuple[int, ...] | None  # None: a chain; else (m + n,): parents[i] < i, -1 = the committed prefix
    wanted: tuple[int, ...]  # rows to score, of the n
    ids: tuple[int, ...] = ()  # (n,) of a tree
    committed: int = 0  # first rows that belong to the committed chain at once: all of a chain
    last_id: int = -1  # of the segment, dropped rows included
    scored: tuple[int, ...] | None = None  # which of the rows asked for are in `wanted`; None: all of them

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


def without_dropped(batch: Batch, placed: Sequence[PlacedSegment]) -> Batch:
    """The batch without the rows, and the segments, of which nothing was placed: what a later stage is given."""
    return Batch(
        tuple(
            _without_dropped(segment, each) for segment, each in zip(batch.segments, placed, strict=True) if each.tokens
        )
    )


def kept_rows(batch: Batch, placed: Sequence[PlacedSegment]) -> NDArray[np.int64]:
    """Which rows of the batch were placed."""
    kept: list[int] = []
    first = 0
    for segment, each in zip(batch.segments, placed, strict=True):
        kept += (first + row for row in _kept(segment, each))
        first += len(segment.tokens)
    return np.array(kept, dtype=np.int64)


def _kept(segment: Segment, placed: PlacedSegment) -> Sequence[int]:
    """Rows of the segment that were placed."""
    if len(placed.tokens) == len(segment.tokens):
        return range(len(segment.tokens))
    ids = set(placed.ids)
    return [row for row, name in enumerate(segment.node_ids) if name in ids]


def _without_dropped(segment: Segment, placed: PlacedSegment) -> Segment:
    if len(placed.tokens) == len(segment.tokens):
        return segment
    assert segment.parents is not None
    parents = tuple(segment.parents[row] for row in _kept(segment, placed))
    # the wanted rows are the segment's last ones, so what is left of them is last too
    return Segment(segment.seq, segment.start, placed.tokens, parents, len(placed.wanted), placed.ids)


def common_length(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix of two lists or tuples, by bisection, since comparing slices is fast."""
    low, high = 0, min(len(known), len(tokens))
    if known[:high] == tokens[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if known[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
