"""An engine around another one that passes everything through: whoever changes one thing overrides that alone."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.batching.kv_prefix import KvRows
from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import Engine, ModelInfo, Output


class WrappedEngine:
    """The engine contract by way of `inner`, whose sequences it owns from now on."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def forward(self, batch: Batch) -> Output:
        return self._inner.forward(batch)

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        self._inner.commit(seq, keep, rest)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._inner.truncate(seq, length)

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._inner.fork(seq, into)

    def export_rows(self, seq: SeqId, tokens: Sequence[int]) -> KvRows:
        return self._inner.export_rows(seq, tokens)

    def adopt_rows(self, seq: SeqId, rows: KvRows) -> None:
        self._inner.adopt_rows(seq, rows)

    def release(self, seq: SeqId) -> None:
        self._inner.release(seq)

    def length(self, seq: SeqId) -> int:
        return self._inner.length(seq)

    @property
    def block_rows(self) -> int:
        return self._inner.block_rows

    def free_rows(self) -> int | None:
        return self._inner.free_rows()

    def check(self) -> None:
        self._inner.check()
