"""What every sequence of an engine holds, so that its rows can be computed again after a preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import SequenceEngine
from paceline.engine.sequence_table import SequenceTable


class Sequences(Protocol):
    """The part of `Engine` that begins and changes sequences between two forwards."""

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int: ...

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None: ...

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix: ...

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None: ...

    def truncate(self, seq: SeqId, length: int) -> None: ...

    def release(self, seq: SeqId) -> None: ...

    def length(self, seq: SeqId) -> int: ...


@dataclass(slots=True)
class _Record:
    tokens: list[int] = field(default_factory=list)  # of the committed rows
    salt: str | None = None  # owner within which its rows are shared; None: they are not
    stored: KvPrefix | None = None  # rows that it may begin with


class SequenceRecords:
    """The sequences of an engine, as if none were ever preempted. Every batch must be reported by `submitted`.

    A preempted sequence is changed here alone: what the engine computes later is what is then left of it. One that is
    being computed again must be preempted once more before it changes. Cannot fork.
    """

    def __init__(self, engine: SequenceEngine) -> None:
        self._engine = engine
        self._table = SequenceTable(vocab_size=engine.info.vocab_size, max_positions=engine.info.max_positions)
        self._records: dict[SeqId, _Record] = {}

    def submitted(self, batch: Batch) -> None:
        """The engine writes these rows, for the first time."""
        placed = self._table.place(batch)
        self._table.written(placed)
        for segment in placed:
            self._records.setdefault(segment.seq, _Record()).tokens += segment.tokens[: segment.committed]

    # ---- preemption -------------------------------------------------------------------------------------------------
    def preempt(self, seq: SeqId) -> None:
        """Release the engine's rows of a sequence. One without rows is as if it had never begun."""
        self._engine.release(seq)
        if not self._table.length(seq):
            self.release(seq)

    def rows_of(self, seq: SeqId) -> tuple[Segment, ...]:
        """Segments that write all rows of a sequence: the committed ones as a chain, then the open tree."""
        tree, record = self._table.tree(seq), self._records.get(seq)
        tokens = tuple(record.tokens) if record is not None else ()
        chain = (Segment(seq, 0, tokens, None, "none"),) if tokens else ()
        if not tree.tokens:
            return chain
        return (*chain, Segment(seq, len(tokens), tree.tokens, tree.parent_ids, "none", tree.ids))

    def begin_again(self, chain: Segment) -> int:
        """Begin a preempted sequence with rows that need not be computed; return how many. Raises EngineError."""
        record = self._records[chain.seq]
        stored = record.stored
        if stored is not None and stored.tokens != chain.tokens[:-1][: len(stored.tokens)]:
            stored = None  # it has been truncated since
        if record.salt is not None:
            return self._engine.begin(chain.seq, chain.tokens, record.salt, stored)
        if stored is None:
            return 0
        self._engine.import_kv(chain.seq, stored)
        return len(stored.tokens)

    # ---- as of an engine --------------------------------------------------------------------------------------------
    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        rows = self._engine.begin(seq, tokens, salt, stored)
        self._begun(seq, tokens[:rows], salt, stored)
        return rows

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        self._engine.import_kv(seq, rows)
        self._begun(seq, rows.tokens, None, rows)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        """Raises EngineError for a preempted sequence, too."""
        return self._engine.export_kv(seq, tokens)

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        if self._is_resident(seq):
            self._engine.prune(seq, keep, live, horizon)
        self._records[seq].tokens += self._table.prune(seq, keep, live, horizon).committed

    def truncate(self, seq: SeqId, length: int) -> None:
        if self._is_resident(seq):
            self._engine.truncate(seq, length)
        self._table.truncate(seq, length)
        del self._records[seq].tokens[length:]

    def release(self, seq: SeqId) -> None:
        self._engine.release(seq)
        self._table.release(seq)
        self._records.pop(seq, None)

    def length(self, seq: SeqId) -> int:
        return self._table.length(seq)

    def check(self) -> None:
        for seq, length in self._table.lengths().items():
            assert len(self._records[seq].tokens) + self._table.num_open_rows(seq) == length, (seq, length)

    def _begun(self, seq: SeqId, tokens: Sequence[int], salt: str | None, stored: KvPrefix | None) -> None:
        self._records[seq] = _Record(list(tokens), salt, stored)
        self._table.adopt(seq, tokens)

    def _is_resident(self, seq: SeqId) -> bool:
        return self._engine.length(seq) == self._table.length(seq)
