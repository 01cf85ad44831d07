"""The thread that owns an engine: what runs together, and what a busy loop may cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Output
from paceline.engine.fake.engine import FakeEngine
from paceline.engine.wrappers import WrappedEngine
from paceline.runtime.engine_loop.executor import Answer
from paceline.runtime.engine_loop.worker import EngineWorker

WAIT_S = 30.0


class Held(WrappedEngine):
    """Its forwards run when they are let, one by one."""

    def __init__(self) -> None:
        super().__init__(FakeEngine())
        self.together: list[set[int]] = []  # the sequences of each step
        self.begun, self.let = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, batch: Batch) -> Output:
        self.together.append({int(segment.seq) for segment in batch.segments})
        self.begun.release()
        assert self.let.acquire(timeout=WAIT_S)
        return super().forward(batch)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


def test_who_waited_goes_on_together_with_who_was_just_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.engine_loop.worker.BATCHING_WAIT_S", WAIT_S)  # however slow this machine is
    asyncio.run(_go_on_together())


async def _go_on_together() -> None:
    engine = Held()
    worker = EngineWorker(engine)
    await worker.start()
    first, second = worker.allocate(), worker.allocate()
    steps: dict[SeqId, int] = {first: 0, second: 0}

    def ask(seq: SeqId) -> None:
        position = steps[seq]
        worker.forward(Segment(seq, position, (7,)), answered(seq))

    def answered(seq: SeqId) -> Answer:
        def answer(result: object) -> None:
            assert isinstance(result, tuple)
            steps[seq] += 1
            if steps[seq] < 4:
                ask(seq)

        return answer

    try:
        ask(first)
        assert await asyncio.to_thread(engine.begun.acquire, timeout=WAIT_S)
        ask(second)  # while the first one's forward is under way
        await asyncio.sleep(0)  # and it reaches the thread
        for _ in range(5):
            engine.let.release()
        await until(lambda: min(steps.values()) == 4)
    finally:
        for _ in range(9):
            engine.let.release()
        await worker.stop()
    both = {int(first), int(second)}
    assert engine.together == [{int(first)}, both, both, both, {int(second)}]


def test_a_busy_loop_holds_no_one_up_for_good() -> None:
    asyncio.run(_stand_still())


async def _stand_still() -> None:
    engine = Held()
    worker = EngineWorker(engine)
    await worker.start()
    first, second = worker.allocate(), worker.allocate()
    told: list[object] = []

    def stuck(result: object) -> None:
        told.append(result)
        # The loop stands still until the other one's forward has begun, which waits for this one: not for ever.
        told.append(engine.begun.acquire(timeout=WAIT_S))

    try:
        worker.forward(Segment(first, 0, (7,)), stuck)
        assert await asyncio.to_thread(engine.begun.acquire, timeout=WAIT_S)
        worker.forward(Segment(second, 0, (7,)), told.append)
        await asyncio.sleep(0)
        engine.let.release()
        engine.let.release()
        await until(lambda: len(told) == 3)
    finally:
        engine.let.release()
        await worker.stop()
    assert told[1] is True
    assert engine.together == [{int(first)}, {int(second)}]
