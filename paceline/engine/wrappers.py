"""Engines around another engine: one that delegates everything, and one with a minimum time per forward.

`DelayedEngine` emulates slower machines in benchmarks by padding each forward to a given time. It sleeps on the thread
that owns the engine, so a caller waits as for a slower machine; the computation itself is unchanged. Where the inner
engine takes longer than the given time, nothing is added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.row import SampledRow
from paceline.engine.base import Engine, ModelInfo, Output, SampleRequest
from paceline.errors import EngineError


class WrappedEngine:
    """Engine that delegates to `inner` and owns its sequences."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def forward(self, batch: Batch) -> Output:
        return self._inner.forward(batch)

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


class DelayedEngine(WrappedEngine):
    """Engine whose forwards take at least forward_s + row_s * (scored rows - 1) seconds.

    Only scored rows count: those of decodes and trees. A prefill scores one row or none, so each of its chunks costs
    one forward, however long. Prunes and other operations are not delayed.
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
        """Delays successful forwards only: a refused batch raises at once."""
        start = self._clock()
        output = super().forward(batch)
        num_scored = sum(map(len, output.logits))
        remaining = start + self.forward_s + self.row_s * max(0, num_scored - 1) - self._clock()
        if remaining > 0:
            self._sleep(remaining)
        return output
