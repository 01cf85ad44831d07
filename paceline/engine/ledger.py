"""What every engine must know of its sequences before it computes: rows written, and a tree not yet committed.

One copy of the checks, so that all engines refuse the same things in the same words. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.segments import Batch, Segment, SeqId
from paceline.errors import EngineError


@dataclass(slots=True)
class Rows:
    """The rows of one sequence."""

    length: int = 0  # rows written, provisional ones included
    tree: Segment | None = None  # the last segment, while it is a tree that was neither committed nor dropped


class Ledger:
    """Rows of all sequences. `admit` only checks; `written` records what an engine has done.

    Every refusal is an EngineError and leaves everything as it was.
    """

    def __init__(self, *, vocab_size: int, max_positions: int) -> None:
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._rows: dict[SeqId, Rows] = {}

    def admit(self, batch: Batch) -> None:
        """Raise unless every segment continues exactly what is written."""
        for segment in batch.segments:
            rows = self._rows.get(segment.seq, Rows())
            if rows.tree is not None:
                raise EngineError(f"sequence {segment.seq} has a tree that was neither committed nor truncated")
            if segment.start != rows.length:
                raise EngineError(
                    f"sequence {segment.seq} has {rows.length} rows, but the segment starts at {segment.start}"
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
            rows = self._rows.setdefault(segment.seq, Rows())
            rows.length += len(segment.tokens)
            rows.tree = segment if segment.parents is not None else None

    def commit(self, seq: SeqId, keep: Sequence[int]) -> Segment:
        """The tree whose rows `keep` remain. Raises unless `keep` is a path that begins at a root."""
        rows = self._rows.get(seq)
        if rows is None or rows.tree is None or rows.tree.parents is None:
            raise EngineError(f"sequence {seq} has no tree to commit")
        tree, above = rows.tree, -1
        for row in keep:
            if not 0 <= row < len(tree.tokens) or rows.tree.parents[row] != above:
                raise EngineError(f"rows {list(keep)} are not a path from a root of the tree of sequence {seq}")
            above = row
        rows.length, rows.tree = tree.start + len(keep), None
        return tree

    def truncate(self, seq: SeqId, length: int) -> None:
        """Raises for rows that were never written, and inside a tree, whose rows have no single order."""
        rows = self._rows.get(seq, Rows())
        limit = rows.length if rows.tree is None else rows.tree.start
        if not 0 <= length <= limit:
            raise EngineError(f"sequence {seq} cannot be truncated to {length} rows: it has {limit}")
        rows.length, rows.tree = length, None

    def fork(self, seq: SeqId, into: SeqId) -> None:
        rows = self._rows.get(seq)
        if rows is None or rows.tree is not None:
            raise EngineError(f"sequence {seq} cannot be forked: unknown, or a tree of it is not committed")
        if into in self._rows:
            raise EngineError(f"sequence {into} exists already")
        self._rows[into] = Rows(rows.length)

    def release(self, seq: SeqId) -> None:
        self._rows.pop(seq, None)

    def __contains__(self, seq: SeqId) -> bool:
        return seq in self._rows

    def length(self, seq: SeqId) -> int:
        rows = self._rows.get(seq)
        return rows.length if rows else 0

    def lengths(self) -> dict[SeqId, int]:
        return {seq: rows.length for seq, rows in self._rows.items()}
