"""Engines around another engine: one that passes everything through, and one that takes a stated time.

`PacedEngine` is the emulated clock of the benchmarks, where decoding is padded to a stated time. It sleeps on the
thread that owns the engine, so that a caller waits as for a slower machine; computing itself is neither slowed down nor
sped up. Where the inner engine takes longer than asked for, its own time stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import Engine, ModelInfo, Output
from paceline.errors import EngineError


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

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        return self._inner.export_kv(seq, tokens)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        self._inner.import_kv(seq, rows)

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


class DelayedEngine(WrappedEngine):
    """`inner`, each forward of which takes at least forward_s + row_s * (wanted rows - 1) seconds.

    Only rows whose distributions are wanted are counted: those of decodes and trees. A prefill wants one row or none,
    and so costs one forward for each piece that it is cut into, however long. Commits and the like are not paced.
    """

    def __init__(
        self,
        inner: Engine,
        forward_s: float,
        row_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if min(forward_s, row_s) < 0:
            raise EngineError(f"a forward takes no negative time: {forward_s} s and {row_s} s a row were asked for")
        super().__init__(inner)
        self.forward_s, self.row_s = forward_s, row_s
        self._clock, self._sleep = clock, sleep

    def forward(self, batch: Batch) -> Output:
        """A refused batch is refused at once."""
        began = self._clock()
        output = super().forward(batch)
        wanted = sum(len(dists) for dists in output.dists)
        left = began + self.forward_s + self.row_s * max(0, wanted - 1) - self._clock()
        if left > 0:
            self._sleep(left)
        return output
