"""From submitted segments to forward passes and answers: the work of the engine's thread, without the thread.

Run by `worker.EngineWorker` on a thread in real time, by `runtime.simulation` in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.aggregation.branches import BranchMixture
from paceline.core.batching.groups import Group
from paceline.core.batching.pending import RECOMPUTED
from paceline.core.batching.scheduler import ScheduledSegment, Scheduler, SchedulerOutput
from paceline.core.batching.segment import Batch, Segment, SeqId, StepSize
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.engine.base import Engine, Logits, SampleRequest
from paceline.errors import EngineError, EngineLost
from paceline.runtime.engine_loop.engine_memory import EngineMemory
from paceline.runtime.engine_loop.prefix_reuse import StoredPrefix
from paceline.runtime.engine_loop.sequence_records import Sequences

log = logging.getLogger("paceline.engine")

Rows = tuple[Dist, ...] | tuple[SampledRow, ...]
Answer = Callable[[Rows | EngineError], None]
Answers = list[tuple[Answer, Rows | EngineError]]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Size of one forward pass at most. A long prefill delays a decode by at most a step of so many rows."""

    rows: int = 512
    sequences: int = 256


DEFAULT_LIMITS = StepLimits()
TICK_S = 1.0  # longer than round trips: an answer that waits for its peer for so long no longer keeps its KV memory
_NOTHING = SchedulerOutput((), ())


@dataclass(frozen=True, slots=True)
class SequenceOp:
    """A change of a sequence between two steps. Pending rows from `from_row` on are cancelled.

    from_row None: no row is cancelled. The change runs after its sequence's pending rows and before its later changes.
    """

    seq: SeqId
    from_row: int | None
    act: Callable[[Sequences], None]

    @staticmethod
    def truncate(seq: SeqId, length: int) -> SequenceOp:
        def act(sequences: Sequences) -> None:
            if sequences.length(seq) > length:  # the forward that writes these rows may have been cancelled
                sequences.truncate(seq, length)

        return SequenceOp(seq, length, act)

    @staticmethod
    def commit(seq: SeqId, keep: tuple[int, ...], rest: tuple[int, ...] = ()) -> SequenceOp:
        return SequenceOp(seq, None, lambda sequences: sequences.commit(seq, keep, rest))

    @staticmethod
    def release(seq: SeqId) -> SequenceOp:
        return SequenceOp(seq, 0, lambda sequences: sequences.release(seq))


@dataclass(slots=True, eq=False)
class ForwardRequest:
    segment: Segment
    answer: Answer
    prefix: StoredPrefix | None = None  # prefix of the segment, if it is a whole prompt
    group: Group | None = None  # sequences of one answer, released together
    sampling: tuple[RowSampling, ...] | None = None  # of each wanted row, whose token is the answer; None: its `Dist`
    salt: str | None = None  # owner within which the KV of a prompt is shared; None: it is not
    join: BranchJoin | None = None  # with the forwards of other branches, in place of `sampling`
    branch: int = 0  # its number in `join`
    cached_rows: int = 0  # first rows of a prompt that were not computed; set before the answer


class BranchJoin:
    """Forwards of one row range on several branches, whose rows are sampled from their mixture once all have run."""

    def __init__(
        self, sampling: tuple[RowSampling, ...], mixture: BranchMixture, answer: Answer, num_branches: int
    ) -> None:
        self.sampling, self.mixture, self.answer = sampling, mixture, answer
        self._missing = num_branches
        self._parts: dict[int, tuple[Logits, ...]] = {}
        self._failed = False

    def add(self, branch: int, parts: tuple[Logits, ...]) -> SampleRequest | None:
        """A branch has run: what to sample, once it was the last."""
        self._parts[branch] = parts
        self._missing -= 1
        if self._missing or self._failed:
            return None
        branches = tuple(self._parts[index] for index in range(len(self._parts)))
        most = max(sum(map(len, parts)) for parts in branches)  # rows of a cached prefix are not computed
        return SampleRequest(branches, self.sampling[-most:], self.mixture)

    def fail(self, error: Rows | EngineError) -> None:
        """A branch has failed: answer once."""
        if not self._failed:
            self._failed = True
            self.answer(error)


class StepExecutor:
    """Call `submit` between steps only; `next` schedules a step and `run` executes it.

    A segment the engine refuses fails alone; an engine fault fails the segments of its step only. An engine that is
    lost fails everything, what is submitted later included.
    """

    def __init__(self, engine: Engine, limits: StepLimits = DEFAULT_LIMITS) -> None:
        self.engine = engine
        self._scheduler = Scheduler(limits.rows, limits.sequences, block_size=engine.block_size)
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
        return self._scheduler.idle

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
            if self._scheduler.stop_restoring(item.seq):
                self._memory.preempt([item.seq])
        self._apply(item)

    def _has_waiting(self, seq: SeqId) -> bool:
        """True if a commit waits for a segment of this sequence; later row numbers then count the rows after it."""
        return any(op.seq == seq for ops in self._after.values() for op in ops)

    def _apply(self, op: SequenceOp) -> None:
        try:
            op.act(self._memory.sequences)
        except Exception:  # the thread must survive; the sequence's next segment will be refused
            log.exception("could not change sequence %s", op.seq)

    def next(self) -> SchedulerOutput | None:
        """Schedule the next step; None when nothing is pending, or nothing fits until memory is released or `tick`."""
        if self.lost is not None:
            return _NOTHING if self._refused else None
        scheduled = self._scheduler.schedule(self._memory)
        self.free_rows = self.engine.free_rows()
        return scheduled

    def run(self, scheduled: SchedulerOutput) -> Answers:
        if self.lost is not None:
            refused, self._refused = self._refused, []
            return [(answer, self.lost) for answer in refused]
        answers: Answers = [
            (self._forget(key).answer, EngineError("the request does not fit in the engine's memory"))
            for key in scheduled.rejected
        ]
        if not scheduled.segments:
            return answers
        return answers + self._forward(scheduled.segments)

    def export_prefixes(self) -> None:
        """Export computed prefixes. Call after a step's answers are sent and before the next `submit`."""
        self._prefixes.export()

    def _forward(self, chunks: tuple[ScheduledSegment, ...]) -> Answers:
        if self.lost is not None:
            return []  # in the first half of this step
        batch = Batch(tuple(chunk.segment for chunk in chunks))
        try:
            output = self.engine.forward(batch)
        except EngineLost as error:
            return self._give_up(error)
        except EngineError as error:
            if len(chunks) > 1:  # a refusal has no effect, and half of a step needs less memory
                half = len(chunks) // 2
                return [answer for part in (chunks[:half], chunks[half:]) for answer in self._forward(part)]
            log.warning("a segment was refused: %s", error)
            return self._fail(chunks, error)
        except Exception as fault:
            # Every caller must receive a result: a missing answer is worse than a failed one.
            log.exception("a step failed")
            return self._fail(chunks, EngineError(f"the engine failed: {fault}"))
        self.steps += 1
        self.rows += batch.num_rows
        self.last = StepSize(batch.num_rows, len(chunks))
        scored = [each for each in zip(chunks, output.logits, strict=True) if each[0].key != RECOMPUTED]
        self._memory.written(Batch(tuple(chunk.segment for chunk, _ in scored)))
        done: list[tuple[Answer, SampleRequest | tuple[Logits, ...]]] = []
        for chunk, logits in scored:
            if logits:
                self._parts[chunk.key].append(logits)
            if chunk.final:
                parts = tuple(self._parts[chunk.key])
                self._prefixes.done(chunk)
                for op in self._after.get(chunk.key, ()):
                    self._apply(op)
                request = self._forget(chunk.key)
                if request.join is not None:
                    joined = request.join.add(request.branch, parts)
                    if joined is not None:
                        done.append((request.join.answer, joined))
                elif request.sampling is not None:
                    rows = request.sampling[-sum(map(len, parts)) :]  # rows of a cached prefix are not computed
                    done.append((request.answer, SampleRequest((parts,), rows)))
                else:
                    done.append((request.answer, parts))
        return self._answers(done)

    def check(self) -> None:
        """Assert the invariants of the engine and of what is known of it."""
        self._memory.check()
        self._scheduler.check()

    def _answers(self, done: list[tuple[Answer, SampleRequest | tuple[Logits, ...]]]) -> Answers:
        """Rows of the forwards that are complete: sampled in one pass, or as distributions."""
        rows = iter(self._sample([wanted for _, wanted in done if isinstance(wanted, SampleRequest)]))
        return [
            (answer, next(rows) if isinstance(wanted, SampleRequest) else _dists(wanted)) for answer, wanted in done
        ]

    def _sample(self, requests: Sequence[SampleRequest]) -> Sequence[Rows | EngineError]:
        """A fault, such as logits that are not numbers, fails its own request only."""
        try:
            return self.engine.sample(requests) if requests else ()
        except Exception as fault:
            if len(requests) > 1:
                return [found for request in requests for found in self._sample([request])]
            log.exception("rows could not be sampled")
            return [EngineError(f"the model's scores are unusable: {fault}")]

    def _fail(self, chunks: tuple[ScheduledSegment, ...], error: EngineError) -> Answers:
        """Fail these segments and the pending ones of their sequences."""
        failed = {chunk.key for chunk in chunks if chunk.key != RECOMPUTED}
        for chunk in chunks:
            failed.update(self._scheduler.cancel(chunk.segment.seq))
        return [(self._forget(key).answer, error) for key in sorted(failed)]

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


def _dists(parts: tuple[Logits, ...]) -> Rows | EngineError:
    try:
        return tuple(dist for part in parts for dist in part.dists())
    except Exception as fault:  # a GPU reports late what went wrong in the forward
        log.exception("distributions could not be read")
        return EngineError(f"the model's scores are unusable: {fault}")
