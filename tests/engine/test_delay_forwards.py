"""`delay_forwards` on an emulated clock, without sleeping."""

from __future__ import annotations

import pytest

from paceline.core.batching.segment import Batch, LogitsMode, Segment, SeqId
from paceline.engine import base
from paceline.engine.base import Output, delay_forwards
from paceline.engine.fake import FakeEngine


class Slow(FakeEngine):
    """Each forward takes 2 s by its own clock, which stands for the module `time`."""

    now, slept = 100.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds

    def forward(self, batch: Batch) -> Output:
        self.now += 2.0
        return super().forward(batch)


@pytest.mark.parametrize(
    ("rows", "logits", "slept"),
    [(1, "last", 4.0), (5, "all", 6.0), (5, "last", 4.0), (400, "last", 4.0), (400, "none", 4.0)],
)
def test_a_forward_takes_its_time_and_more_for_every_scored_row(
    rows: int, logits: LogitsMode, slept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(seed=3)
    monkeypatch.setattr(base, "time", slow)
    delay_forwards(slow, 6.0, 0.5).forward(Batch((Segment(SeqId(1), 0, (1,) * rows, None, logits),)))
    assert (slow.slept, slow.now) == (pytest.approx(slept), pytest.approx(102.0 + slept))
