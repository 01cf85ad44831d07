"""The thread that owns an engine.

Callers submit segments on one event loop, where their callbacks run too. Submissions of one turn of the loop reach
the thread together, so that sixteen sessions answered together continue as one batch. After a step, the thread waits
briefly for the sessions it has just answered before it runs others: else two groups of eight would alternate for ever.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from typing import cast

from paceline.core.batching.pending import Group
from paceline.core.batching.segment import Segment, SeqId, StepSize
from paceline.core.energy import AnswerEnergy, StepMeter
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling
from paceline.engine.base import AsyncEngine, Engine
from paceline.errors import EngineError, EngineLost
from paceline.runtime.engine_loop.executor import STEP_ROWS, TICK_S, Answered, Answers, StepExecutor
from paceline.runtime.engine_loop.requests import Answer, Certainty, ForwardRequest, Rows, SequenceOp, StoredPrefix
from paceline.runtime.service import Load
from paceline.runtime.units import pin
from paceline.system import trim_heap

log = logging.getLogger("paceline.engine")


DELIVERY_S = 0.002  # of answers in one turn of the loop; then it does what else waits, such as sending the first ones
IDLE_S = 1.0  # without work before the engine checks its invariants
BATCHING_WAIT_S = 0.002  # minimum wait for the sessions just answered; it may be as long as the last step


def deliver(answer: Answer, result: Rows | EngineError) -> None:
    try:
        answer(result)
    except Exception:  # one session's fault must not affect the others
        log.exception("an answer could not be delivered")


class Worker(ABC):
    """The model of a node, as sessions use it: on one event loop, where answers come.

    Order is kept per sequence: a truncate takes effect after the forwards before it and cancels those that have not
    run.
    """

    depth = 1  # forwards that should be under way so that no part of the engine waits
    block_size = 1  # rows of KV memory that are allocated together
    told = False  # of a row the likeliest ids alone are known, which `SampledRow.top` has
    doubt = ""  # why answers are approximate, of `told` ones those whose `Certainty` says so; empty: none is

    def __init__(self, meter_name: str = "", send_w: float = 0.0) -> None:
        self._meter_name, self._send_w = meter_name, send_w
        self.answered = StepSize()  # size of the step whose answer is being delivered; on the loop
        self.capacity: int | None = None  # rows of KV in all; None without a bound
        self.lost = asyncio.Event()  # the engine is, see `fault`; every request fails from then on
        self._next_seq = 0
        self._next_group = 0

    @abstractmethod
    async def start(self) -> None:
        """On the loop that is called back."""

    @abstractmethod
    async def stop(self) -> None:
        """Pending segments are never answered."""

    @abstractmethod
    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        """The `cached_rows` and `energy` of a forward are known when it is answered."""

    @property
    @abstractmethod
    def fault(self) -> EngineLost | None:
        """Why the engine cannot be used any more; None while it can."""

    @property
    def is_away(self) -> bool:
        """Every request fails now, and later ones may not."""
        return False

    @abstractmethod
    def load(self) -> Load:
        """The fields that tell of the engine. May be called on any thread."""

    def allocate(self) -> SeqId:
        self._next_seq += 1
        return SeqId(self._next_seq)

    def group(
        self, rows: int, line: tuple[Hashable, int] | None = None, *, owner: str = "", criticality: float = 0.0
    ) -> Group:
        """A group of sequences that need this number of rows at most, all together."""
        self._next_group += 1
        return Group(self._next_group, rows, line=line, owner=owner, criticality=criticality)

    def certainty(self) -> Certainty:
        """Of one answer, before its first forward."""
        return Certainty(approximate=bool(self.doubt) and not self.told)

    def account(self) -> AnswerEnergy:
        return AnswerEnergy(self._meter_name, self._send_w)

    async def compute(
        self, segment: Segment, group: Group | None = None, prefix: StoredPrefix | None = None
    ) -> tuple[Dist, ...]:
        """Distributions of a segment's rows. Raises EngineError. The caller must release the sequence if cancelled."""
        return cast(tuple[Dist, ...], await self.rows(segment, group, prefix))

    async def rows(
        self,
        segment: Segment,
        group: Group | None = None,
        prefix: StoredPrefix | None = None,
        sampling: tuple[RowSampling, ...] | None = None,
    ) -> Rows:
        """As `compute`; sampling: of each wanted row, whose token comes then in place of its distribution."""
        answered: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()

        def answer(result: Rows | EngineError) -> None:
            if answered.done():
                return  # cancelled
            if isinstance(result, EngineError):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        self.submit(ForwardRequest(segment, answer, group=group, prefix=prefix, sampling=sampling))
        return await answered

    def expect(self) -> None:  # noqa: B027  # only steps wait
        """A session that continues soon does so a little later: the next step waits for it, but not for long."""

    def continued(self) -> None:  # noqa: B027
        """One of those has continued."""


class EngineWorker(Worker):
    """Runs an engine on a thread of its own between `start` and `stop`."""

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        rows: int = STEP_ROWS,
        *,
        meter: StepMeter | None = None,
        send_w: float = 0.0,
        cores: frozenset[int] = frozenset(),
    ) -> None:
        """rows: of a step, at most. meter: of the steps' energy, read on the thread. send_w: power of this side while
        it sends, W. cores: where the thread is kept; empty: anywhere."""
        super().__init__("" if meter is None else meter.name, send_w)
        self.steps = StepExecutor(engine, rows, meter)  # its counters may be read on any thread
        self.depth, self.block_size = self.steps.depth, engine.block_size
        self.capacity = engine.free_rows()
        self.doubt = engine.info.doubt
        self._cores = cores
        self._outbox: list[SequenceOp | ForwardRequest] = []  # submitted in this turn of the loop
        self._inbox: deque[SequenceOp | ForwardRequest] = deque()  # read by the thread; guarded by `_changed`
        self._undelivered: deque[tuple[deque[Answered], StepSize]] = deque()  # of steps, on the loop
        self._changed = threading.Condition()
        self._ready = False  # a batch under way has run
        self._delivering = 0  # steps whose answers are sent and whose sessions have not continued yet
        self._expected = 0  # sessions that have been answered, and will continue when something else is computed
        self._stopping = False
        self.steps.arrivals = self._submit_arrivals
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Finish the current step, execute submitted releases, and end the thread."""
        self._flush()
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:  # it was started
            await asyncio.to_thread(self._thread.join)

    # ---- on the loop ------------------------------------------------------------------------------------------------
    @property
    def fault(self) -> EngineLost | None:
        return self.steps.lost

    @property
    def is_away(self) -> bool:
        return self.steps.is_away

    def load(self) -> Load:
        steps = self.steps
        return Load(
            steps=steps.steps,
            rows=steps.rows,
            cached_rows=steps.prefixes.adopted,
            preemptions=steps.scheduler.preemptions,
            kv_rows=self.capacity,
            kv_free_rows=steps.free_rows,
            waiting=len(steps.scheduler.short),
        )

    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        assert self._loop is not None, "the worker has not been started"
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(item)

    def _flush(self) -> None:
        with self._changed:
            self._inbox.extend(self._outbox)
            if not self._undelivered:  # else the thread would wake for each part of a delivery, and wait on
                self._changed.notify()
        self._outbox.clear()

    def expect(self) -> None:
        with self._changed:
            self._expected += 1

    def continued(self) -> None:
        with self._changed:
            self._expected -= 1
        self._flush()

    def _deliver(self, answers: Answers, step: StepSize) -> None:
        """Begin to deliver the answers of a step, after those of the steps before it."""
        if self.steps.lost is not None:
            self.lost.set()
        self._undelivered.append((deque(answers), step))
        if len(self._undelivered) == 1:
            self._deliver_some()

    def _deliver_some(self) -> None:
        """Deliver for `DELIVERY_S`, and go on in the next turn of the loop."""
        assert self._loop is not None
        end = time.perf_counter() + DELIVERY_S
        while self._undelivered:
            answers, self.answered = self._undelivered[0]
            while answers:
                deliver(*answers.popleft())
                if answers and time.perf_counter() >= end:
                    self._loop.call_soon(self._deliver_some)
                    return
            self._undelivered.popleft()
            with self._changed:
                self._delivering -= 1
            self._flush()  # what the answers led to at once

    # ---- on the thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        assert self._loop is not None
        pin(self._cores)
        trim_heap()  # of what loading the model has freed
        self.steps.notify(self._wake)
        while True:
            try:
                return self._step_on()
            except Exception as fault:
                if self.steps.lost is not None:
                    raise
                log.exception("the engine's thread has failed")
                self._send(self.steps.give_up(EngineLost(f"the engine's thread has failed: {fault}")))

    def _step_on(self) -> None:
        """Steps, until the worker is stopped."""
        progressed, checked, idle, seconds, started = False, False, False, 0.0, 0.0
        ticked = time.perf_counter()
        while True:
            with self._changed:
                if not (self._inbox or progressed or self._ready or self._stopping):
                    # For work, for a batch under way, or for a release when no pending segment fits.
                    woken = self._changed.wait(TICK_S if self.steps.scheduler.short else None if checked else IDLE_S)
                    idle = not (woken or self._inbox or self._ready or self._stopping)
                else:
                    idle = False
                if self._inbox or progressed:
                    if self._delivering and not (progressed and self.steps.all_begun):
                        # A busy loop must not delay the engine for longer than a separate step would take.
                        self._changed.wait_for(self._has_continued, max(seconds, BATCHING_WAIT_S))
                    if self._expected:
                        self._changed.wait_for(lambda: self._stopping or not self._expected, BATCHING_WAIT_S)
                items = self._inbox.copy()
                self._inbox.clear()
                self._ready = False
                stopping = self._stopping  # now: what is submitted before a later stop is taken in the next turn
            if progressed:  # with what the loop has done for its answers, for which the next step has waited
                self.steps.took(time.perf_counter() - started)
            while items:  # a name for an item would hold the answer behind it while the thread waits
                self.steps.submit(items.popleft())
            if stopping:
                return
            if idle and not checked and self.steps.idle:
                self._check()
            checked = idle
            if self.steps.scheduler.short and time.perf_counter() - ticked >= TICK_S:
                self.steps.scheduler.tick()
                ticked = time.perf_counter()
            scheduled = self.steps.next()
            progressed = scheduled is not None
            if scheduled is None:
                continue
            started = time.perf_counter()
            answers = self.steps.run(scheduled)
            seconds = time.perf_counter() - started
            if answers:
                self._send(answers)
                answers = []  # likewise
                self.steps.prefixes.export()

    def _send(self, answers: Answers) -> None:
        assert self._loop is not None
        with self._changed:
            self._delivering += 1
        self._loop.call_soon_threadsafe(self._deliver, answers, self.steps.last)

    def _wake(self) -> None:
        """A batch under way has run. On any thread."""
        with self._changed:
            self._ready = True
            self._changed.notify()

    def _has_continued(self) -> bool:
        return self._stopping or not self._delivering

    def _submit_arrivals(self) -> None:
        """See `StepExecutor.arrivals`."""
        with self._changed:
            if self._delivering and self.steps.engine.info.accelerated:  # it computes meanwhile
                self._changed.wait_for(self._has_continued, BATCHING_WAIT_S)
            items = self._inbox.copy()
            self._inbox.clear()
        while items:
            self.steps.submit(items.popleft())

    def _check(self) -> None:
        """Check the engine's invariants when idle, so that a leak is found early, and give back what was freed."""
        try:
            self.steps.check()
        except AssertionError:
            log.exception("the engine's invariants do not hold: please report this")
        trim_heap()
