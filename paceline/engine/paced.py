"""An engine that takes its time: the emulated clock of the benchmarks, where decoding is padded to a stated time.

Sleeps on the thread that owns the engine, so whoever waits for a forward waits as for a slower machine; computing
itself is neither slowed down nor sped up. Where the inner engine takes longer than asked for, its own time stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.core.batching.segment import Batch
from paceline.engine.base import Engine, Output
from paceline.engine.wrapped import WrappedEngine
from paceline.errors import EngineError


class PacedEngine(WrappedEngine):
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
