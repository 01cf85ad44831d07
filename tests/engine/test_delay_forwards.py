"""`delay_forwards` on an emulated clock, without sleeping."""

from __future__ import annotations

import pytest

from paceline.core.batching.segment import Batch, LogitsMode, Segment, SeqId
from paceline.engine import base
from paceline.engine.base import Engine, Output, delay_forwards
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError
from tests.engine.trials import Growing

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


def test_rows_of_all_segments_count_and_a_forward_that_is_slow_itself_is_not_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    engine = delayed(clock, 1.0, 0.5)
    pair = [Segment(SeqId(i), 0, (1, 2), (-1, -1), "all") for i in range(2)]
    engine.forward(Batch(tuple(pair)))
    engine.forward(Batch((Segment(SEQ, 2, (1,), (0,), ids=(2,)),)))
    assert clock.slept == [0.5]


def test_a_refusal_comes_at_once_and_only_forwards_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine = delayed(clock, 6.0)
    growing = Growing(engine, SEQ)
    growing.grow([1, 2, 3], [-1, 0, 0])
    forwards = len(clock.slept)
    growing.prune([0], [2])
    growing.truncate(1)
    with pytest.raises(EngineError):
        engine.forward(Batch((Segment(SEQ, 5, (1,)),)))
    assert len(clock.slept) == forwards
