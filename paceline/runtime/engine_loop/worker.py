"""The one thread that owns an engine.

Callers live on one event loop; they submit segments and are called back there. What has been submitted in one turn
of the loop reaches the thread together, so that sixteen sessions which were answered together go on as one batch. And
those who waited meanwhile wait until these have gone on: else two groups of eight would take turns for ever.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque

from paceline.core.batching.scheduler import Group
from paceline.core.batching.segment import Segment, SeqId, StepSize
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.executor import (
    TOKEN_BUDGET,
    Answer,
    Answers,
    ForwardRequest,
    SequenceOp,
    StepExecutor,
)
from paceline.runtime.engine_loop.prefix_reuse import StoredPrefix

log = logging.getLogger("paceline.engine")


IDLE_S = 1.0  # without work, until the engine is asked to check itself
BATCHING_WAIT_S = 0.002  # at least, for those who have just been answered; at most what the last step took


class EngineWorker:
    """Runs an engine on a thread of its own between `start` and `stop`, both on the loop that is called back.

    Per sequence, order is kept: a truncate comes after the forwards before it, and drops those that have not run.
    """

    def __init__(self, engine: Engine, *, token_budget: int = TOKEN_BUDGET) -> None:
        self.steps = StepExecutor(engine, token_budget=token_budget)  # its counters may be read from anywhere
        self.answered = StepSize()  # which the answer being delivered comes from; on the loop
        self.capacity = engine.free_rows()  # rows of KV in all; None without a bound
        self._next_seq = 0
        self._next_group = 0
        self._outbox: list[SequenceOp | ForwardRequest] = []  # this turn's, on the loop
        self._inbox: deque[SequenceOp | ForwardRequest] = deque()  # the thread's, under the condition
        self._wanted = threading.Condition()
        self._delivering = 0  # steps whose answers are out, and whose sessions have not gone on yet
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Finish the step under way, release what was asked to be released, and end the thread.

        Segments that are still pending are never answered.
        """
        self._flush()
        with self._wanted:
            self._stopping = True
            self._wanted.notify()
        await asyncio.to_thread(self._thread.join)

    # ---- on the loop ------------------------------------------------------------------------------------------------
    def allocate(self) -> SeqId:
        self._next_seq += 1
        return SeqId(self._next_seq)

    def group(self, rows: int) -> Group:
        """For sequences that claim so many rows together, and give them back together."""
        self._next_group += 1
        return Group(self._next_group, rows)

    def has_begun(self, group: Group) -> bool:
        """Has any of its rows been given memory? As of a moment ago."""
        return self.steps.has_begun(group)

    def lacks_memory(self, group: Group) -> bool:
        """Does it wait for memory, not for its turn? As of the last step."""
        return self.steps.lacks_memory(group)

    def forward(
        self, segment: Segment, answer: Answer, prefix: StoredPrefix | None = None, group: Group | None = None
    ) -> None:
        self._submit(ForwardRequest(segment, answer, prefix, group))

    async def compute(self, segment: Segment, group: Group | None = None) -> tuple[Dist, ...]:
        """The laws of a segment's rows. Raises EngineError. Who stops waiting frees the rows himself."""
        answered: asyncio.Future[tuple[Dist, ...]] = asyncio.get_running_loop().create_future()

        def answer(result: tuple[Dist, ...] | EngineError) -> None:
            if answered.done():
                return  # cancelled meanwhile
            if isinstance(result, EngineError):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        self.forward(segment, answer, group=group)
        return await answered

    def control(self, control: SequenceOp) -> None:
        self._submit(control)

    def _submit(self, item: SequenceOp | ForwardRequest) -> None:
        assert self._loop is not None, "the worker has not been started"
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(item)

    def _flush(self) -> None:
        with self._wanted:
            self._inbox.extend(self._outbox)
            self._wanted.notify()
        self._outbox.clear()

    def _delivered(self) -> None:
        """What the answers led to is handed over at once."""
        with self._wanted:
            self._delivering -= 1
        self._flush()

    def _deliver(self, answers: Answers, step: StepSize) -> None:
        self.answered = step
        for answer, result in answers:
            try:
                answer(result)
            except Exception:  # one session's fault must not cost the others their answers
                log.exception("an answer could not be delivered")
        self._delivered()

    # ---- on the thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        assert self._loop is not None
        moved, checked, idle, seconds = False, False, False, 0.0
        while True:
            with self._wanted:
                if not (self._inbox or moved or self._stopping):
                    # For work, or for a release when all that is pending lacks room.
                    woken = self._wanted.wait(None if checked else IDLE_S)
                    idle = not (woken or self._inbox or self._stopping)
                else:
                    idle = False
                if self._delivering and (self._inbox or moved):
                    # A busy loop must not hold the engine up for longer than a step apart would take.
                    self._wanted.wait_for(self._has_gone_on, max(seconds, BATCHING_WAIT_S))
                items = list(self._inbox)
                self._inbox.clear()
            for item in items:
                self.steps.submit(item)
            if self._stopping:
                return
            if idle and not checked and self.steps.idle:
                self._check()
            checked = idle
            scheduled = self.steps.next()
            moved = scheduled is not None
            if scheduled is None:
                continue
            began = time.perf_counter()
            answers = self.steps.run(scheduled)
            seconds = time.perf_counter() - began
            if answers:
                with self._wanted:
                    self._delivering += 1
                self._loop.call_soon_threadsafe(self._deliver, answers, self.steps.last)
                self.steps.export_prefixes()

    def _has_gone_on(self) -> bool:
        return self._stopping or not self._delivering

    def _check(self) -> None:
        """A leak is found by the first idle second, not by the hundredth hour."""
        try:
            self.steps.engine.check()
        except AssertionError:
            log.exception("the engine's invariants do not hold: please report this")
