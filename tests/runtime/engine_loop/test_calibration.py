"""Forward times measured at start."""

from __future__ import annotations

import asyncio

import pytest

from lab.engines import WrappedEngine
from paceline.core.batching.segment import Batch
from paceline.engine.base import Engine, Output
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.document_prefill import PREFIX, REPEATS, ROWS, Timed, forward_times
from tests.runtime.engine_loop.test_worker import started


class Narrow(WrappedEngine):
    """An engine that refuses forwards of more than so many rows."""

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
        async with started(engine) as worker:
            return await forward_times(worker, engine.info.vocab_size)

    return asyncio.run(measure())


def test_each_row_count_is_timed_and_no_sequence_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.engine_loop.document_prefill.MAX_S", 600.0)
    engine = Narrow(64)
    found = timed(engine)
    assert [rows for rows, _ in found] == [rows for rows in ROWS for _ in range(REPEATS - 1)]
    assert all(seconds > 0.0 for _, seconds in found)
    assert engine.rows == [PREFIX, *(rows for rows in ROWS for _ in range(REPEATS))]
    assert engine.length(1) == 0


def test_a_slow_engine_is_timed_for_fewer_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.engine_loop.document_prefill.MAX_S", 0.0)
    assert [rows for rows, _ in timed(FakeEngine())] == [1] * (REPEATS - 1)


def test_an_engine_error_does_not_prevent_the_start() -> None:
    assert timed(Narrow(1)) == []
    assert {rows for rows, _ in timed(Narrow(PREFIX))} == {1, 2, 4, 8, 16}
