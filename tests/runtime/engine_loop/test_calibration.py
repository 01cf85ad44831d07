"""Forwards that are timed before the first answer."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.batching.segment import Batch
from paceline.core.drafting.online_stats import OnlineStats
from paceline.engine.base import Engine, Output
from paceline.engine.fake.engine import FakeEngine
from paceline.engine.wrappers import WrappedEngine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.calibration import PREFIX, ROWS, REPEATS, Timed, forward_times
from paceline.runtime.engine_loop.worker import EngineWorker


class Narrow(WrappedEngine):
    """Refuses forwards of more than so many rows."""

    def __init__(self, most: int) -> None:
        super().__init__(FakeEngine())
        self.most = most
        self.rows: list[int] = []

    def forward(self, batch: Batch) -> Output:
        if batch.num_rows > self.most:
            raise EngineError("too wide")
        self.rows.append(batch.num_rows)
        return super().forward(batch)


def timed(engine: Engine) -> list[Timed]:
    async def measure() -> list[Timed]:
        worker = EngineWorker(engine)
        await worker.start()
        try:
            return await forward_times(worker)
        finally:
            await worker.stop()

    return asyncio.run(measure())


def test_each_row_count_is_timed_and_nothing_stays_behind() -> None:
    engine = Narrow(64)
    found = timed(engine)
    assert [rows for rows, _ in found] == [rows for rows in ROWS for _ in range(REPEATS - 1)]
    assert all(seconds > 0.0 for _, seconds in found)
    assert engine.rows == [PREFIX, *(rows for rows in ROWS for _ in range(REPEATS))]
    assert engine.length(1) == 0


def test_a_slow_engine_is_timed_as_far_as_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.engine_loop.calibration.MAX_S", 0.0)
    assert [rows for rows, _ in timed(FakeEngine())] == [1] * (REPEATS - 1)


def test_an_engine_that_refuses_keeps_nobody_from_starting() -> None:
    assert timed(Narrow(1)) == []
    assert {rows for rows, _ in timed(Narrow(PREFIX))} == {1, 2, 4, 8, 16}


def test_what_was_timed_is_known_from_the_first_step_on() -> None:
    experience = OnlineStats()
    experience.begin([(rows, 0.02 + 0.001 * rows) for rows in ROWS for _ in range(2)], PREFIX)
    assert experience.budget.seconds(1) == pytest.approx(0.021)
    assert experience.budget.seconds(24) == pytest.approx(0.044, rel=0.05)
    assert experience.timing.speed(PREFIX).decode_s == pytest.approx(0.021, rel=0.05)
