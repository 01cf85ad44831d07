"""From submitted segments to forward passes and answers: the work of the engine's thread, without the thread.

Run by `worker.EngineWorker` on a thread in real time, by `lab.simulation` in virtual time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.core.batching.pending import RECOMPUTED, Group
from paceline.core.batching.scheduler import ScheduledSegment, Scheduler, SchedulerOutput, alternating
from paceline.core.batching.segment import Batch, SeqId, StepSize
from paceline.core.energy import StepMeter
from paceline.engine.base import AsyncEngine, Engine, Logits, SequenceEngine, runner_of
from paceline.errors import EngineError, EngineLost
from paceline.runtime.engine_loop.answers import Answers, Done, answers_of, done_of, rows_ahead
from paceline.runtime.engine_loop.engine_memory import EngineMemory
from paceline.runtime.engine_loop.in_flight import InFlight
from paceline.runtime.engine_loop.requests import Answer, ForwardRequest, SequenceOp

log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Size of one forward pass at most. A long prefill delays a decode by at most a step of so many rows."""

    rows: int = 512
    sequences: int = 256


DEFAULT_LIMITS = StepLimits()
LEAST_ROWS = 64  # of a step of a pipeline at most, however many stages it has
TICK_S = 1.0  # longer than round trips: an answer that waits for its peer for so long no longer keeps its KV memory
_NOTHING = SchedulerOutput((), ())


class StepExecutor:
    """Call `submit` between steps only; `next` schedules a step and `run` executes it, or begins to.

    On an engine with several batches under way, `run` returns the answers that have become ready; `notify` tells when
    there are more.

    A segment the engine refuses fails alone; an engine fault fails the segments of its step only. An engine that is
    lost fails everything, what is submitted later included.
    """

    def __init__(
        self, engine: Engine | AsyncEngine, limits: StepLimits = DEFAULT_LIMITS, meter: StepMeter | None = None
    ) -> None:
        """meter: of the steps' energy; never raises."""
        self.engine: SequenceEngine = engine
        self._meter = meter
        runner = runner_of(engine)
        self.notify = runner.notify
        self._in_flight = InFlight(runner)
        rows = _rows_per_step(limits, runner.depth)
        self._scheduler = Scheduler(rows, limits.sequences, block_size=engine.block_size)
        self._next_key = 0
        self._requests: dict[int, ForwardRequest] = {}
        self._parts: dict[int, list[Logits]] = {}  # results so far of segments that the scheduler has chunked
        self._after: dict[int, list[SequenceOp]] = {}  # operations that wait for a segment, by its key
        self._memory = EngineMemory(engine)
        self._memory.running = self._scheduler.running
        self._prefixes = self._memory.prefixes
        self.lost: EngineLost | None = None
        self._refused: list[Answer] = []  # of requests submitted since then
        self.steps = 0  # forward passes
        self.rows = 0  # rows in them
        self.last = StepSize()  # size of the last step
        self.free_rows = engine.free_rows()  # as of the last `next`; None without a bound

    @property
    def adopted(self) -> int:
        """Rows imported from stored prefixes instead of computed."""
        return self._prefixes.adopted

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._in_flight

    @property
    def depth(self) -> int:
        """Steps that should be under way so that no part of the engine waits."""
        return self._in_flight.depth

    @property
    def preemptions(self) -> int:
        """Groups whose rows were released for others, so far."""
        return self._scheduler.preemptions

    @property
    def short(self) -> frozenset[Group]:
        """Groups that wait for memory, not for their turn or a peer, as of the last step; preempted ones included."""
        return self._scheduler.short

    def tick(self) -> None:
        """`TICK_S` have passed. To be called while groups are `short`."""
        self._scheduler.tick()

    def took(self, seconds: float) -> None:
        """Record the time of the last `run`, s, with what its answers have cost until they could be continued. By it
        chunks of prompts beside answers are limited, and one owner's rows beside others'. Ignored with several batches
        under way, whose times overlap."""
        if self.depth == 1 and not self._in_flight:
            self._scheduler.took(seconds)

    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        if self.lost is not None:
            if isinstance(item, ForwardRequest):
                self._refused.append(item.answer)
            return
        if isinstance(item, ForwardRequest):
            self._next_key += 1
            self._requests[self._next_key] = item
            self._parts[self._next_key] = []
            self._prefixes.add(self._next_key, item)
            self._scheduler.add(self._next_key, item.segment, group=item.group)
            return
        last = self._scheduler.last(item.seq)
        if last is not None and (item.from_row is None or (item.from_row > 0 and self._has_waiting(item.seq))):
            self._after.setdefault(last, []).append(item)
            return
        if item.from_row is not None:
            for key in self._scheduler.cancel(item.seq, item.from_row):
                self._forget(key)  # cancelled by the caller: no answer
            for key in self._in_flight.keys(item.seq, item.from_row):
                if key in self._requests:
                    self._forget(key)
            if self._scheduler.stop_restoring(item.seq):
                self._memory.preempt([item.seq])
        self._apply(item)

    def _has_waiting(self, seq: SeqId) -> bool:
        """True if a prune waits for a segment of this sequence; later row numbers then count the rows after it."""
        return any(op.seq == seq for ops in self._after.values() for op in ops)

    def _apply(self, op: SequenceOp) -> None:
        try:
            op.act(self._memory.sequences, self._in_flight.horizon(op.seq))
        except Exception:  # the thread must survive; the sequence's next segment will be refused
            log.exception("could not change sequence %s", op.seq)

    def next(self) -> SchedulerOutput | None:
        """Schedule the next step; empty if only answers are to be taken. None when nothing is pending, nothing fits
        until memory is released or `tick`, or the engine has enough to do."""
        if self.lost is not None:
            return _NOTHING if self._refused else None
        scheduled = self._scheduler.schedule(self._memory) if self._in_flight.has_room else None
        if self._meter is not None and scheduled is not None and not self._in_flight:
            self._meter.begin()
        self.free_rows = self.engine.free_rows()
        return _NOTHING if scheduled is None and self._in_flight.is_ready else scheduled

    def run(self, scheduled: SchedulerOutput) -> Answers:
        if self.lost is not None:
            refused, self._refused = self._refused, []
            return [(answer, self.lost) for answer in refused]
        answers: Answers = [
            (self._forget(key).answer, EngineError("the request does not fit in the engine's memory"))
            for key in scheduled.rejected
        ]
        if scheduled.segments:
            answers += self._begin(scheduled.segments)
        while self._in_flight.is_ready:
            answers += self._finish()
        return answers

    def export_prefixes(self) -> None:
        """Export computed prefixes. Call after a step's answers are sent and before the next `submit`."""
        self._prefixes.export()

    def _begin(self, chunks: tuple[ScheduledSegment, ...]) -> Answers:
        """Submit a step. Answers come of what could not be."""
        if self.lost is not None:
            return []  # in the first half of this step
        try:
            self._in_flight.submit(chunks, lambda chunk: rows_ahead(self._requests.get(chunk.key), chunk))
        except EngineLost as error:
            return self._give_up(error)
        except EngineError as error:
            if len(chunks) > 1:  # a refusal has no effect, and half of a step needs less memory
                half = len(chunks) // 2
                first = self._begin(chunks[:half])
                return first + self._begin(chunks[half:])
            log.warning("a segment was refused: %s", error)
            return self._fail(chunks, error)
        except Exception as fault:
            # Every caller must receive a result: a missing answer is worse than a failed one.
            log.exception("a step failed")
            return self._fail(chunks, EngineError(f"the engine failed: {fault}"))
        self._memory.submitted(Batch(tuple(chunk.segment for chunk in chunks if chunk.key != RECOMPUTED)))
        for chunk in chunks:
            if chunk.final and chunk.key != RECOMPUTED:
                self._prefixes.done(chunk)
                for op in self._after.pop(chunk.key, ()):
                    self._apply(op)
        return []

    def _finish(self) -> Answers:
        """Take the result of the oldest step."""
        step = self._in_flight.pop()
        try:
            output = self._in_flight.collect(step)
        except EngineLost as error:
            return self._give_up(error)
        except Exception as error:
            log.exception("a step failed")
            return self._fail(step.chunks, EngineError(f"the engine failed: {error}"))
        num_rows = sum(len(chunk.segment.tokens) for chunk in step.chunks)
        self.steps += 1
        self.rows += num_rows
        self.last = StepSize(num_rows, len(step.chunks))
        done: list[Done] = []
        owners: list[str] = []  # likewise
        computed: list[tuple[ForwardRequest, int]] = []  # with the rows of the step that were theirs
        scored = output.scored or (None,) * len(step.chunks)
        for chunk, logits, rows in zip(step.chunks, output.logits, scored, strict=True):
            request = self._requests.get(chunk.key)
            if request is None:
                continue  # cancelled under way, or computed again for nobody
            computed.append((request, len(chunk.segment.tokens)))
            if logits:
                self._parts[chunk.key].append(logits)
            if chunk.final:
                request.scored = rows
                complete = done_of(request, tuple(self._parts[chunk.key]))
                done += complete
                owners += ["" if request.group is None else request.group.owner] * len(complete)
                self._forget(chunk.key)
        done = [done[place] for place in alternating(owners)]
        answers = answers_of(self.engine, done)  # before the meter is read: a GPU computes until its tokens are
        if self._meter is not None:
            energy = self._meter.end([chunk.segment for chunk in step.chunks])
            for request, own_rows in computed:
                request.energy = request.energy.plus(energy.share(own_rows, num_rows))
        return answers

    def check(self) -> None:
        """Assert the invariants of the engine and of what is known of it."""
        self._memory.check()
        self._scheduler.check()

    def _fail(self, chunks: tuple[ScheduledSegment, ...], error: EngineError) -> Answers:
        """Fail these segments and the pending ones of their sequences."""
        failed = {chunk.key for chunk in chunks if chunk.key != RECOMPUTED}
        for chunk in chunks:
            failed.update(self._scheduler.cancel(chunk.segment.seq))
        return [(self._forget(key).answer, error) for key in sorted(failed & self._requests.keys())]

    def _give_up(self, error: EngineLost) -> Answers:
        """Fail every request, and all later ones."""
        log.critical("the engine is lost: %s", error)
        self.lost = error
        for seq in {request.segment.seq for request in self._requests.values()}:
            self._scheduler.cancel(seq)
        return [(self._forget(key).answer, error) for key in sorted(self._requests)]

    def _forget(self, key: int) -> ForwardRequest:
        del self._parts[key]
        self._prefixes.forget(key)
        self._after.pop(key, None)
        return self._requests.pop(key)


def _rows_per_step(limits: StepLimits, depth: int) -> int:
    """Rows of one step at most. A pipeline has several under way, so that the chunks of one prompt keep all of its
    stages at work: together they have as many rows as the one step of another engine."""
    return limits.rows if depth == 1 else min(limits.rows, max(LEAST_ROWS, limits.rows // (depth - 1)))
