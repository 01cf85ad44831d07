"""An asynchronous engine with one batch under way: as an `Engine`, so that it obeys the same laws."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.row import SampledRow
from paceline.engine.base import AsyncEngine, ModelInfo, Output, SampleRequest


class Blocking:
    def __init__(self, inner: AsyncEngine) -> None:
        self._inner = inner

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def forward(self, batch: Batch) -> Output:
        return self._inner.collect(self._inner.submit(batch))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        return self._inner.sample(requests)

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        self._inner.prune(seq, keep, live, horizon)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._inner.truncate(seq, length)

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._inner.fork(seq, into)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        return self._inner.export_kv(seq, tokens)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        self._inner.import_kv(seq, rows)

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        return self._inner.begin(seq, tokens, salt, stored)

    def release(self, seq: SeqId) -> None:
        self._inner.release(seq)

    def length(self, seq: SeqId) -> int:
        return self._inner.length(seq)

    @property
    def block_size(self) -> int:
        return self._inner.block_size

    def free_rows(self) -> int | None:
        return self._inner.free_rows()

    def check(self) -> None:
        self._inner.check()
