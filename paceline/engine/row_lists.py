"""Engines that compute on the host from a list of rows for each sequence: all but what their distributions are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from paceline.core.batching.block_manager import OutOfBlocks
from paceline.core.batching.segment import Batch, PlacedSegment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import SampledRow
from paceline.engine.base import ModelInfo, Output, SampleRequest
from paceline.engine.sequence_table import SequenceTable
from paceline.errors import EngineError

Row = TypeVar("Row")


class RowListEngine(ABC, Generic[Row]):
    """Runs one batch after the other. Without `export_kv`, `import_kv` and `begin`, which differ."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._table = SequenceTable(vocab_size=info.vocab_size, max_positions=info.max_positions)
        self._rows: dict[SeqId, list[Row]] = {}
        self._salts: dict[SeqId, str] = {}  # of sequences that have begun with one

    @abstractmethod
    def _append(self, segment: PlacedSegment) -> tuple[Dist, ...]:
        """Write the rows of one segment; returns the distributions of the wanted ones."""

    def _reserve(self, num_rows: int, what: str) -> None:
        """Raises OutOfBlocks where so many rows are not free."""
        free = self.free_rows()
        if free is not None and num_rows > free:
            raise OutOfBlocks(f"out of memory: {num_rows} rows {what}, {free} free")

    def _begin(self, seq: SeqId, salt: str) -> None:
        if seq in self._table or seq in self._salts:
            raise EngineError(f"sequence {seq} exists already")
        self._salts[seq] = salt

    def _committed(self, seq: SeqId) -> list[Row]:
        return self._rows[seq][: self._table.length(seq) - self._table.num_open_rows(seq)]

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        placed = self._table.place(batch)
        self._reserve(sum(len(segment.tokens) for segment in placed), "asked for")
        try:
            dists = tuple(self._append(segment) for segment in placed)
        except Exception:
            for segment in placed:
                del self._rows.get(segment.seq, [])[segment.start :]
                if segment.seq not in self._table:
                    self._rows.pop(segment.seq, None)
            raise
        self._table.written(placed)
        return Output.dense(dists, tuple(segment.scored for segment in placed))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        return [request.by_reference() for request in requests]

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        kept = self._table.prune(seq, keep, live, horizon)
        rows = self._rows.setdefault(seq, [])
        rows[kept.first :] = [rows[kept.first + row] for row in kept.order]

    def truncate(self, seq: SeqId, length: int) -> None:
        self._table.truncate(seq, length)
        if seq in self._rows:
            del self._rows[seq][length:]

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._reserve(self._table.length(seq), "to fork")
        self._table.fork(seq, into)
        self._rows[into] = list(self._rows[seq])

    def release(self, seq: SeqId) -> None:
        self._table.release(seq)
        self._rows.pop(seq, None)
        self._salts.pop(seq, None)

    def length(self, seq: SeqId) -> int:
        return self._table.length(seq)

    @property
    def block_size(self) -> int:
        return 1

    def free_rows(self) -> int | None:
        return None

    def check(self) -> None:
        held = {seq: len(rows) for seq, rows in self._rows.items()}
        assert held == self._table.lengths(), (held, self._table.lengths())
