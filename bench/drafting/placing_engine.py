"""An engine around another one that knows the positions of the rows it runs, for scripted distributions."""

from __future__ import annotations

from collections.abc import Sequence

from lab.engines import WrappedEngine
from paceline.core.batching.segment import Batch, PlacedSegment, SeqId
from paceline.engine.base import Engine
from paceline.engine.sequence_table import SequenceTable


class PlacingEngine(WrappedEngine):
    """Sequences begin with their first segment: prefixes are neither shared nor imported."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        info = inner.info
        self._table = SequenceTable(vocab_size=info.vocab_size, max_positions=info.max_positions)

    def run(self, batch: Batch) -> tuple[PlacedSegment, ...]:
        """A forward whose scores are not used."""
        super().forward(batch)
        placed = self._table.place(batch)
        self._table.written(placed)
        return placed

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        super().prune(seq, keep, live, horizon)
        self._table.prune(seq, keep, live, horizon)

    def truncate(self, seq: SeqId, length: int) -> None:
        super().truncate(seq, length)
        self._table.truncate(seq, length)

    def release(self, seq: SeqId) -> None:
        super().release(seq)
        self._table.release(seq)
