"""A pipeline's sequences as its caller sees them: as if everything that was sent had run. Used by every pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.core.batching.block_manager import OutOfBlocks
from paceline.core.batching.segment import Batch, PlacedSegment, SeqId
from paceline.engine.base import Logits, Output
from paceline.engine.sequence_table import SequenceTable
from paceline.errors import EngineError


class SentRows:
    """Sequences, the memory they take at each stage, and which of them were lost with a step that failed."""

    def __init__(self, *, vocab_size: int, max_positions: int, capacity: int, block_size: int) -> None:
        """capacity: rows of the KV cache of the stage that has fewest."""
        self.table = SequenceTable(vocab_size=vocab_size, max_positions=max_positions)
        self.failed: set[SeqId] = set()  # to be released
        self._capacity, self._block_size = capacity, block_size

    def place(self, batch: Batch) -> tuple[PlacedSegment, ...]:
        """Segments of a batch, placed. Raises EngineError for one that cannot run."""
        if failed := {segment.seq for segment in batch.segments} & self.failed:
            raise EngineError(f"sequences {sorted(failed)} were lost with a step that failed")
        placed = self.table.place(batch)
        rows = {segment.seq: len(segment.tokens) for segment in placed}
        if self._blocks(rows) > self._num_blocks:
            raise OutOfBlocks(f"out of memory: {batch.num_rows} rows asked for, {self.free_rows()} free")
        return placed

    def fail(self, batch: Batch) -> None:
        """The batch has failed: its sequences are lost, but for those released meanwhile."""
        self.failed.update(segment.seq for segment in batch.segments if segment.seq in self.table)

    def check_result(self, batch: Batch) -> None:
        """Raise EngineError for a batch with a sequence that an earlier one has lost."""
        if lost := {segment.seq for segment in batch.segments} & self.failed:
            raise EngineError(f"sequences {sorted(lost)} were lost with a step that failed")

    def release(self, seq: SeqId) -> None:
        self.table.release(seq)
        self.failed.discard(seq)

    def set_capacity(self, rows: int) -> None:
        """A stage has been replaced by one with another memory."""
        self._capacity = rows

    @property
    def _num_blocks(self) -> int:
        return self._capacity // self._block_size

    def free_rows(self) -> int:
        """As if forks shared nothing."""
        return max(0, self._num_blocks - self._blocks({})) * self._block_size

    def _blocks(self, more: dict[SeqId, int]) -> int:
        """Blocks in use with so many rows more of each sequence."""
        lengths = Counter(self.table.lengths())
        lengths.update(more)
        return sum(-(-rows // self._block_size) for rows in lengths.values())


def scored_of(asked: Batch, left: Batch, output: Output) -> list[tuple[Logits | None, tuple[int, ...] | None]]:
    """Of each segment of `asked`, the logits and which of its `logits_rows()` they are of; None: all.

    left, output: what of the batch the last stage was given, and has returned. No logits: nothing of the segment came.
    """
    scored: Sequence[tuple[int, ...] | None] = output.scored or (None,) * len(left.segments)
    found = {
        segment.seq: (segment, logits, rows)
        for segment, logits, rows in zip(left.segments, output.logits, scored, strict=True)
    }
    parts: list[tuple[Logits | None, tuple[int, ...] | None]] = []
    for each in asked.segments:
        if each.seq not in found:
            parts.append((None, ()))
            continue
        segment, logits, rows = found[each.seq]
        if rows is None and len(segment.tokens) == len(each.tokens):
            parts.append((logits, None))
            continue
        wanted = [segment.node_ids[row] for row in segment.logits_rows()]
        names = set(wanted if rows is None else (wanted[row] for row in rows))
        parts.append((logits, tuple(i for i, row in enumerate(each.logits_rows()) if each.node_ids[row] in names)))
    return parts
