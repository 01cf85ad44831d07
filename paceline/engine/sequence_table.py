"""Sequence table: the cached rows and the open tree of each sequence.

All engines share these checks, so they refuse the same segments with the same error messages. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.errors import EngineError


class OpenTree(NamedTuple):
    """Provisional rows: the last rows of their sequence, in the order of writing, or of `rest` after a commit."""

    tokens: tuple[int, ...] = ()  # (m,)
    parents: tuple[int, ...] = ()  # (m,) parents[i] < i, -1 = the committed prefix


NOTHING_OPEN = OpenTree()


class KeptRows(NamedTuple):
    """Rows of an open tree that remain after a commit; the engine must move them."""

    first: int  # the tree's first row in its sequence
    size: int  # rows of the tree before the commit
    order: tuple[int, ...]  # remaining rows of the tree, to be stored in this order from `first` on
    committed: tuple[int, ...]  # tokens added to the committed chain


@dataclass(slots=True)
class CachedRows:
    """Cached rows of one sequence."""

    length: int = 0  # rows written, provisional ones included
    tree: OpenTree = NOTHING_OPEN

    @property
    def committed(self) -> int:
        return self.length - len(self.tree.tokens)


class SequenceTable:
    """Cached rows of all sequences. `validate` only checks; `written` records a forward.

    A refusal raises EngineError and leaves everything unchanged.
    """

    def __init__(self, *, vocab_size: int, max_positions: int) -> None:
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._rows: dict[SeqId, CachedRows] = {}

    def validate(self, batch: Batch) -> None:
        """Raise unless every segment starts at its sequence's last row and grows its open tree, if any."""
        for segment in batch.segments:
            rows = self._rows.get(segment.seq, CachedRows())
            if segment.start != rows.length:
                raise EngineError(
                    f"sequence {segment.seq} has {rows.length} rows, but the segment starts at {segment.start}"
                )
            repeated = (segment.parents or ())[: segment.num_open_rows]
            if repeated != rows.tree.parents:
                raise EngineError(
                    f"sequence {segment.seq} has an open tree with the parents {rows.tree.parents}: a segment must "
                    f"grow it, or a commit or truncate close it first; this one repeats {repeated}"
                )
            last = max(segment.positions())
            if last >= self._max_positions:
                raise EngineError(
                    f"sequence {segment.seq} would reach position {last}; the model has {self._max_positions}"
                )
            if not all(0 <= token < self._vocab_size for token in segment.tokens):
                raise EngineError(f"sequence {segment.seq} holds a token outside 0..{self._vocab_size - 1}")

    def written(self, batch: Batch) -> None:
        for segment in batch.segments:
            rows = self._rows.setdefault(segment.seq, CachedRows())
            rows.length += len(segment.tokens)
            if segment.parents is not None:
                rows.tree = OpenTree(rows.tree.tokens + segment.tokens, segment.parents)

    def path(self, segment: Segment, row: int) -> list[int]:
        """Tokens from a root of the tree to `row` of this segment, which is validated and not yet written."""
        tree = self._rows.get(segment.seq, CachedRows()).tree
        tokens = tree.tokens + segment.tokens
        return [token for token, is_on_path in zip(tokens, segment.mask()[row], strict=True) if is_on_path]

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> KeptRows:
        """Raise unless `keep` is a path from a root and `rest`, ascending, is connected below its end. See `Engine`."""
        rows = self._rows.get(seq)
        if rows is None or not rows.tree.tokens:
            raise EngineError(f"sequence {seq} has no tree to commit")
        tokens, parents = rows.tree
        end = -1
        for row in keep:
            if not 0 <= row < len(tokens) or parents[row] != end:
                raise EngineError(f"rows {list(keep)} are not a path from a root of the tree of sequence {seq}")
            end = row
        index = {end: -1}  # row → its index in the remaining tree
        last = -1
        for row in rest:
            if not last < row < len(tokens) or parents[row] not in index:
                raise EngineError(
                    f"rows {list(rest)} of sequence {seq} cannot stay open: they must rise, and each must hang below "
                    f"another of them or below row {end}"
                )
            index[row] = len(index) - 1
            last = row
        kept = KeptRows(rows.committed, len(tokens), (*keep, *rest), tuple(tokens[row] for row in keep))
        rows.length = kept.first + len(kept.order)
        rows.tree = OpenTree(tuple(tokens[row] for row in rest), tuple(index[parents[row]] for row in rest))
        return kept

    def truncate(self, seq: SeqId, length: int) -> None:
        """Raise for rows that were never written, and for a length inside an open tree."""
        rows = self._rows.get(seq, CachedRows())
        if not 0 <= length <= rows.committed:
            raise EngineError(f"sequence {seq} cannot be truncated to {length} rows: it has {rows.committed}")
        rows.length, rows.tree = length, NOTHING_OPEN

    def fork(self, seq: SeqId, into: SeqId) -> None:
        rows = self._rows.get(seq)
        if rows is None or rows.tree.tokens:
            raise EngineError(f"sequence {seq} cannot be forked: unknown, or a tree of it is open")
        if into in self._rows:
            raise EngineError(f"sequence {into} exists already")
        self._rows[into] = CachedRows(rows.length)

    def export(self, seq: SeqId, num_rows: int) -> None:
        """Raise unless the first `num_rows` rows are committed."""
        committed = self._rows.get(seq, CachedRows()).committed
        if not 0 < num_rows <= committed:
            raise EngineError(f"sequence {seq} cannot export {num_rows} rows: it has {committed}")

    def adopt(self, seq: SeqId, tokens: Sequence[int]) -> None:
        """Record a new sequence that starts with the rows of these tokens."""
        if seq in self._rows:
            raise EngineError(f"sequence {seq} exists already")
        if len(tokens) > self._max_positions or not all(0 <= token < self._vocab_size for token in tokens):
            raise EngineError(f"sequence {seq} cannot adopt {len(tokens)} rows: too many, or of unknown tokens")
        self._rows[seq] = CachedRows(len(tokens))

    def release(self, seq: SeqId) -> None:
        self._rows.pop(seq, None)

    def __contains__(self, seq: SeqId) -> bool:
        return seq in self._rows

    def tree(self, seq: SeqId) -> OpenTree:
        rows = self._rows.get(seq)
        return rows.tree if rows else NOTHING_OPEN

    def num_open_rows(self, seq: SeqId) -> int:
        return len(self._rows[seq].tree.tokens)

    def length(self, seq: SeqId) -> int:
        rows = self._rows.get(seq)
        return rows.length if rows else 0

    def lengths(self) -> dict[SeqId, int]:
        return {seq: rows.length for seq, rows in self._rows.items()}
