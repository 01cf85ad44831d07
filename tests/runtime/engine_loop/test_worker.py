"""The thread that owns an engine: batching of answered sequences, delay by a busy loop, forward times at the start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest

from lab.engines import WrappedEngine
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine, Output
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError, EngineLost
from paceline.runtime.engine_loop.document_prefill import PREFIX, REPEATS, ROWS, Timed, forward_times
from paceline.runtime.engine_loop.requests import Answer, ForwardRequest, SequenceOp
from paceline.runtime.engine_loop.worker import EngineWorker

pytestmark = pytest.mark.anyio

WAIT_S = 30.0


class GatedEngine(WrappedEngine):
    """An engine whose forwards each wait for a permit."""

    def __init__(self) -> None:
        super().__init__(FakeEngine())
        self.batches: list[set[int]] = []  # sequences of each step
        self.begun, self.permits = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, batch: Batch) -> Output:
        self.batches.append({int(segment.seq) for segment in batch.segments})
        self.begun.release()
        assert self.permits.acquire(timeout=WAIT_S)
        return super().forward(batch)


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[EngineWorker]:
    """At the end no forward waits for a permit."""
    worker = EngineWorker(engine)
    await worker.start()
    try:
        yield worker
    finally:
        if isinstance(engine, GatedEngine):
            engine.permits.release(9)
        await worker.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


async def test_a_waiting_sequence_is_batched_with_those_just_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.engine_loop.worker.BATCHING_WAIT_S", WAIT_S)  # long enough for any machine
    engine = GatedEngine()
    steps: dict[SeqId, int] = {}

    def ask(seq: SeqId) -> None:
        position = steps.setdefault(seq, 0)
        worker.submit(ForwardRequest(Segment(seq, position, (7,)), answered(seq)))

    def answered(seq: SeqId) -> Answer:
        def answer(result: object) -> None:
            assert isinstance(result, tuple)
            steps[seq] += 1
            if steps[seq] < 4:
                ask(seq)

        return answer

    async with started(engine) as worker:
        first, second = worker.allocate(), worker.allocate()
        ask(first)
        assert await asyncio.to_thread(engine.begun.acquire, timeout=WAIT_S)
        ask(second)  # while the first forward is running
        await asyncio.sleep(0)  # the submission reaches the thread
        engine.permits.release(5)
        await until(lambda: min(steps.values()) == 4)
    both = {int(first), int(second)}
    assert engine.batches == [{int(first)}, both, both, both, {int(second)}]


async def test_a_busy_loop_delays_others_for_a_bounded_time() -> None:
    engine = GatedEngine()
    received: list[object] = []

    def block(result: object) -> None:
        received.append(result)
        # Blocks the loop until the other forward has begun, which must not wait for this session for ever.
        received.append(engine.begun.acquire(timeout=WAIT_S))

    async with started(engine) as worker:
        first, second = worker.allocate(), worker.allocate()
        worker.submit(ForwardRequest(Segment(first, 0, (7,)), block))
        assert await asyncio.to_thread(engine.begun.acquire, timeout=WAIT_S)
        worker.submit(ForwardRequest(Segment(second, 0, (7,)), received.append))
        await asyncio.sleep(0)
        engine.permits.release(2)
        await until(lambda: len(received) == 3)
    assert received[1] is True
    assert engine.batches == [{int(first)}, {int(second)}]


async def test_the_time_of_a_step_includes_what_its_answers_cost_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one key's rows are limited by their whole price, of which a fast engine's forward is the smaller part."""
    monkeypatch.setattr("paceline.runtime.engine_loop.worker.BATCHING_WAIT_S", WAIT_S)
    now, took = [0.0], list[float]()
    monkeypatch.setattr("paceline.runtime.engine_loop.worker.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("paceline.runtime.engine_loop.executor.StepExecutor.took", lambda _, s: took.append(s))

    def answer(_: object) -> None:
        now[0] += 5.0

    async with started(FakeEngine()) as worker:
        worker.submit(ForwardRequest(Segment(worker.allocate(), 0, (7,)), answer))
        await until(lambda: bool(took))
    assert took == [5.0]


async def test_a_group_that_waits_for_something_else_does_not_keep_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.engine_loop.worker.TICK_S", 0.0)
    async with asyncio.timeout(WAIT_S), started(FakeEngine(capacity_rows=10)) as worker:
        older, younger = (worker.group(10) for _ in range(2))
        first, second = worker.allocate(), worker.allocate()
        (before,) = await worker.compute(Segment(first, 0, (1, 2, 3, 4, 5, 6)), older)
        await worker.compute(Segment(second, 0, (1, 2, 3, 4, 5)), younger)
        assert worker.steps.scheduler.preemptions == 1
        (after,) = await worker.compute(Segment(first, 6, (7,)), older)
        assert worker.steps.scheduler.preemptions == 2
        worker.submit(SequenceOp.release(second))
        (whole,) = await worker.compute(Segment(worker.allocate(), 0, (1, 2, 3)), worker.group(3))
    (expected,) = FakeEngine().forward(Batch((Segment(SeqId(1), 0, (1, 2, 3, 4, 5, 6, 7)),))).dists[0]
    assert after.probs.tolist() == expected.probs.tolist() != before.probs.tolist() != whole.probs.tolist()


async def test_the_first_answer_of_each_owner_is_sent_before_the_rest_of_one_owners_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.runtime.engine_loop.worker.DELIVERY_S", 0.0)  # one answer in a turn of the loop
    engine = GatedEngine()
    loop = asyncio.get_running_loop()
    seen: list[str] = []

    def answer_of(owner: str) -> Answer:
        def answer(result: object) -> None:
            assert isinstance(result, tuple)
            seen.append(f"{owner} is answered")
            loop.call_soon(seen.append, f"{owner}'s is sent")

        return answer

    async with started(engine) as worker:
        for owner in ("bert", "bert", "bert", "ann"):
            segment = Segment(worker.allocate(), 0, (7,))
            worker.submit(ForwardRequest(segment, answer_of(owner), group=worker.group(2, owner=owner)))
        engine.permits.release()
        await until(lambda: len(seen) == 8)
    assert len(engine.batches) == 1
    assert seen.index("ann's is sent") <= 3, "one of Bert's is before it at most"
    assert seen.index("bert's is sent") < len(seen) - 1 - seen[::-1].index("bert is answered")


# ---- forward times measured at the start ----------------------------------------------------------------------------
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


async def test_a_fault_beside_the_forwards_ends_no_thread_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each who waits is told, each who comes is refused, and the program learns that its engine is lost."""
    worker = EngineWorker(FakeEngine())
    await worker.start()
    monkeypatch.setattr(worker.steps.scheduler, "schedule", Mock(side_effect=RuntimeError("CUDA out of memory")))
    try:
        for _ in range(2):
            async with asyncio.timeout(30):
                with pytest.raises(EngineLost, match="CUDA out of memory"):
                    await worker.compute(Segment(worker.allocate(), 0, (1, 2)))
        async with asyncio.timeout(30):
            await worker.lost.wait()
    finally:
        await worker.stop()
