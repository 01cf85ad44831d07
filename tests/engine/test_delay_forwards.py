"""`delay_forwards` on an emulated clock, without sleeping."""

from __future__ import annotations

import pytest

from paceline.core.batching.segment import Batch, LogitsMode, Segment, SeqId
from paceline.engine import base
from paceline.engine.base import Engine, Output, delay_forwards
from paceline.engine.fake import FakeEngine

SEQ = SeqId(1)


class Clock:
    """Stands for the module `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.slept = 100.0, list[float]()
        monkeypatch.setattr(base, "time", self)

    def perf_counter(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 9))
        self.time += seconds


class Slow(FakeEngine):
    """Each forward takes 2 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(seed=3)
        self._clock = clock

    def forward(self, batch: Batch) -> Output:
        self._clock.time += 2.0
        return super().forward(batch)


def delayed(clock: Clock, forward_s: float, row_s: float = 0.0) -> Engine:
    return delay_forwards(Slow(clock), forward_s, row_s)


@pytest.mark.parametrize(
    ("rows", "logits", "slept"),
    [(1, "last", 4.0), (5, "all", 6.0), (5, "last", 4.0), (400, "last", 4.0), (400, "none", 4.0)],
)
def test_a_forward_takes_its_time_and_more_for_every_scored_row(
    rows: int, logits: LogitsMode, slept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    engine = delayed(clock, 6.0, 0.5)
    engine.forward(Batch((Segment(SEQ, 0, (1,) * rows, None, logits),)))
    assert clock.slept == [slept] and clock.time == 102.0 + slept
