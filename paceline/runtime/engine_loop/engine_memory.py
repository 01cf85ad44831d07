"""The engine's memory as the scheduler uses it: what is free, how a sequence begins, and preemption."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from paceline.core.batching.pending import RECOMPUTED, Memory
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import SequenceEngine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.prefix_reuse import PrefixReuse
from paceline.runtime.engine_loop.sequence_records import SequenceRecords, Sequences

log = logging.getLogger("paceline.engine")


class EngineMemory(Memory):
    """Memory of one engine. Without a bound nothing is ever preempted, and nothing is recorded.

    sequences: change them here, never on the engine itself. running: sequences that hold rows, for the scheduler.
    """

    def __init__(self, engine: SequenceEngine) -> None:
        self._engine = engine
        self._capacity = engine.free_rows()
        self._records = SequenceRecords(engine) if self._capacity is not None else None
        self.sequences: Sequences = self._records or engine
        self.prefixes = PrefixReuse(self.sequences)
        self.running: Collection[SeqId] = ()

    def submitted(self, batch: Batch) -> None:
        """The engine runs this batch, which holds nothing that is computed again."""
        if self._records is not None and batch.segments:
            self._records.submitted(batch)

    # ---- as the scheduler uses it -----------------------------------------------------------------------------------
    def free_rows(self) -> int | None:
        """Rows that may be written if every sequence had its own copy of what it shares: the scheduler's accounts
        assume that a sequence frees all of its rows."""
        free = self._engine.free_rows()
        if free is None or self._capacity is None:
            return None
        size, length = self._engine.block_size, self._engine.length
        used = sum(-(-length(seq) // size) * size for seq in self.running)
        return min(free, self._capacity - used)

    def held(self, seq: SeqId) -> int:
        return self._engine.length(seq)

    def begin(self, key: int, segment: Segment) -> int | None:
        if key != RECOMPUTED:
            return self.prefixes.begin(key, segment)
        assert self._records is not None, "rows are recomputed, but nothing is ever preempted"
        try:
            return self._records.begin_again(segment)
        except EngineError as error:
            log.warning("rows of a preempted sequence are all computed again: %s", error)
            return 0

    def preempt(self, seqs: Sequence[SeqId]) -> None:
        assert self._records is not None, "without a bound nothing is preempted"
        self.prefixes.export()
        for seq in seqs:
            self.prefixes.interrupt(seq)
            self._records.preempt(seq)

    def rows_of(self, seq: SeqId) -> Sequence[Segment]:
        return self._records.rows_of(seq) if self._records is not None else ()

    def check(self) -> None:
        self._engine.check()
        if self._records is not None:
            self._records.check()
