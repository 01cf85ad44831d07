"""What every sequence of an engine holds, so that its rows can be computed again after a preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.batching.block_manager import KvPrefix
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
    tokens: list[int] = field(default_factory=list)  # of the committed rows that the table knows
    salt: str | None = None  # owner within which its rows are shared; None: they are not
    stored: KvPrefix | None = None  # rows that it may begin with
    later: list[int] = field(default_factory=list)  # tokens of rows that were committed since
    tree: Segment | None = None  # open rows behind them


class SequenceRecords:
    """The sequences of an engine, as if none were ever preempted. Every batch must be reported by `submitted`.

    A preempted sequence is changed here alone: what the engine computes later is what is then left of it. One that is
    being computed again must be preempted once more before it changes. Cannot fork.

    Most answers only grow, and are never preempted: their chains, and trees of which a path is kept at once, are noted
    as tokens, and the table learns of them when a sequence is changed otherwise or looked at.
    """

    def __init__(self, engine: SequenceEngine) -> None:
        self._engine = engine
        self._table = SequenceTable(vocab_size=engine.info.vocab_size, max_positions=engine.info.max_positions)
        self._records: dict[SeqId, _Record] = {}

    def submitted(self, batch: Batch) -> None:
        """The engine writes these rows, for the first time."""
        for segment in batch.segments:
            record = self._records.get(segment.seq)
            if record is None:
                record = self._records[segment.seq] = _Record()
            if record.tree is not None or not self._table.is_settled(segment.seq):
                self._settle(segment.seq)
                self._write(record, segment)
            elif segment.parents is None:
                record.later += segment.tokens
            else:
                record.tree = segment

    # ---- preemption -------------------------------------------------------------------------------------------------
    def preempt(self, seq: SeqId) -> None:
        """Release the engine's rows of a sequence. One without rows is as if it had never begun."""
        self._engine.release(seq)
        if not self.length(seq):
            self.release(seq)

    def rows_of(self, seq: SeqId) -> tuple[Segment, ...]:
        """Segments that write all rows of a sequence: the committed ones as a chain, then the open tree."""
        self._settle(seq)
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
        record = self._records[seq]
        if record.tree is not None and horizon is None and not live:
            token_of = dict(zip(record.tree.node_ids, record.tree.tokens, strict=True))
            record.later += [token_of[name] for name in keep]
            record.tree = None
        else:
            self._settle(seq)
            record.tokens += self._table.prune(seq, keep, live, horizon).committed

    def truncate(self, seq: SeqId, length: int) -> None:
        if self._is_resident(seq):
            self._engine.truncate(seq, length)
        self._settle(seq)
        self._table.truncate(seq, length)
        del self._records[seq].tokens[length:]

    def release(self, seq: SeqId) -> None:
        self._engine.release(seq)
        self._table.release(seq)
        self._records.pop(seq, None)

    def length(self, seq: SeqId) -> int:
        record, known = self._records.get(seq), self._table.length(seq)
        if record is None:
            return known
        return known + len(record.later) + (0 if record.tree is None else len(record.tree.tokens))

    def check(self) -> None:
        for seq in self._records:
            self._settle(seq)
        for seq, length in self._table.lengths().items():
            assert len(self._records[seq].tokens) + self._table.num_open_rows(seq) == length, (seq, length)

    def _settle(self, seq: SeqId) -> None:
        """Tell the table what has only been noted of a sequence."""
        record = self._records.get(seq)
        if record is None:
            return
        if record.later:
            chain = Segment(seq, self._table.length(seq), tuple(record.later), None, "none")
            record.later.clear()
            self._write(record, chain)
        if record.tree is not None:
            tree, record.tree = record.tree, None
            self._write(record, tree)

    def _write(self, record: _Record, segment: Segment) -> None:
        (placed,) = self._table.place(Batch((segment,)))
        self._table.written((placed,))
        record.tokens += placed.tokens[: placed.committed]

    def _begun(self, seq: SeqId, tokens: Sequence[int], salt: str | None, stored: KvPrefix | None) -> None:
        self._records[seq] = _Record(list(tokens), salt, stored)
        self._table.adopt(seq, tokens)

    def _is_resident(self, seq: SeqId) -> bool:
        return self._engine.length(seq) == self.length(seq)
