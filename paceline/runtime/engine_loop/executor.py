"""From submitted segments to forward passes and answers: the work of the engine's thread, without the thread.

Run by `worker.EngineWorker` on a thread in real time, by `lab.simulation` in virtual time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from paceline.core.batching.pending import RECOMPUTED, Memory
from paceline.core.batching.scheduler import ScheduledSegment, Scheduler, SchedulerOutput
from paceline.core.batching.segment import Batch, Segment, SeqId, StepSize
from paceline.core.energy import StepMeter
from paceline.core.fair import Turns
from paceline.core.sampling.sampler import RowSampling, RowTree, SampledRow
from paceline.engine.base import (
    AsyncEngine,
    Engine,
    Logits,
    SampleRequest,
    SamplesAhead,
    SequenceEngine,
    Sequences,
    Ticket,
    runner_of,
)
from paceline.errors import EngineError, EngineLost, EngineRefusal
from paceline.runtime.engine_loop.requests import (
    Answer,
    ForwardRequest,
    PrefixReuse,
    Rows,
    SequenceOp,
    SequenceRecords,
)

log = logging.getLogger("paceline.engine")


Answered = tuple[Answer, Rows | EngineError]
Answers = list[Answered]
Done = tuple[Answer, SampleRequest | tuple[Logits, ...] | EngineError]  # what to answer: sampled, or distributions


def done_of(request: ForwardRequest, parts: tuple[Logits, ...]) -> list[Done]:
    """What to answer to a request that has run; nothing while other branches of its join have not.

    parts: results of its chunks, in order.
    """
    if request.join is not None:
        if request.scored is not None:
            return [(request.answer, EngineError("rows of a mixture were pruned while they were computed"))]
        joined = request.join.add(request.branch, parts)
        return [] if joined is None else [(request.join.answer, joined)]
    if request.sampling is None or not parts:
        return [(request.answer, parts)]
    sampling = request.sampling
    if request.scored is not None:
        sampling = tuple(sampling[row] for row in request.scored)
    rows = sampling[-sum(map(len, parts)) :]  # rows of a cached prefix are not computed
    tree = _tree_of(request.segment) if request.path_only and request.scored is None else None
    return [(request.answer, SampleRequest((parts,), rows, tree=tree))]


def _tree_of(segment: Segment) -> RowTree | None:
    if segment.parents is None:
        return None
    row_of = {name: row for row, name in enumerate(segment.node_ids)}
    return RowTree(tuple(row_of.get(parent, -1) for parent in segment.parents), segment.tokens)


def rows_ahead(request: ForwardRequest | None, chunk: ScheduledSegment) -> tuple[RowSampling, ...] | None:
    """How the wanted rows of a chunk will be sampled; None: not alone, or not at all."""
    if request is None or request.sampling is None or request.join is not None or not chunk.final:
        return None
    count = len(chunk.segment.logits_rows())
    return request.sampling[-count:] if 0 < count <= len(request.sampling) else None


def answers_of(engine: SequenceEngine, done: Sequence[Done]) -> Answers:
    """Rows of the forwards that are complete: sampled in one pass, or as distributions."""
    rows = iter(_sample(engine, [wanted for _, wanted in done if isinstance(wanted, SampleRequest)]))
    answers: Answers = []
    for answer, wanted in done:
        if isinstance(wanted, SampleRequest):
            answers.append((answer, next(rows)))
        else:
            answers.append((answer, wanted if isinstance(wanted, EngineError) else _dists(wanted)))
    return answers


def _sample(engine: SequenceEngine, requests: Sequence[SampleRequest]) -> Sequence[Rows | EngineError]:
    """A fault, such as logits that are not numbers, fails its own request only."""
    try:
        return engine.sample(requests) if requests else ()
    except EngineRefusal as refusal:
        return [refusal] * len(requests)
    except Exception as fault:
        if len(requests) > 1:
            return [found for request in requests for found in _sample(engine, [request])]
        log.exception("rows could not be sampled")
        return [EngineError(f"the model's scores are unusable: {fault}")]


def _dists(parts: tuple[Logits, ...]) -> Rows | EngineError:
    try:
        return tuple(dist for part in parts for dist in part.dists())
    except EngineRefusal as refusal:
        return refusal
    except Exception as fault:  # a GPU reports late what went wrong in the forward
        log.exception("distributions could not be read")
        return EngineError(f"the model's scores are unusable: {fault}")


class EngineMemory(Memory):
    """Memory of one engine. Without a bound nothing is ever preempted, and nothing is recorded.

    sequences: change them here, never on the engine itself. running: sequences that hold rows, for the scheduler.
    """

    def __init__(self, engine: SequenceEngine) -> None:
        self._engine = engine
        self._capacity = engine.free_rows()
        self._records = SequenceRecords(engine) if self._capacity is not None else None
        self.sequences: Sequences = self._records or engine
        self.prefixes = PrefixReuse(self.sequences)
        self.running: Collection[SeqId] = ()

    def submitted(self, batch: Batch) -> None:
        """The engine runs this batch, which holds nothing that is computed again."""
        if self._records is not None and batch.segments:
            self._records.submitted(batch)

    # ---- as the scheduler uses it -----------------------------------------------------------------------------------
    def free_rows(self) -> int | None:
        """Rows that may be written if every sequence had its own copy of what it shares: the scheduler's accounts
        assume that a sequence frees all of its rows."""
        free = self._engine.free_rows()
        if free is None or self._capacity is None:
            return None
        size, length = self._engine.block_size, self._engine.length
        used = sum(-(-length(seq) // size) * size for seq in self.running)
        return min(free, self._capacity - used)

    def held(self, seq: SeqId) -> int:
        return self._engine.length(seq)

    def begin(self, key: int, segment: Segment) -> int | None:
        if key != RECOMPUTED:
            return self.prefixes.begin(key, segment)
        assert self._records is not None, "rows are recomputed, but nothing is ever preempted"
        try:
            return self._records.begin_again(segment)
        except EngineError as error:
            log.warning("rows of a preempted sequence are all computed again: %s", error)
            return 0

    def preempt(self, seqs: Sequence[SeqId]) -> None:
        assert self._records is not None, "without a bound nothing is preempted"
        self.prefixes.export()
        for seq in seqs:
            self.prefixes.interrupt(seq)
            self._records.preempt(seq)

    def rows_of(self, seq: SeqId) -> Sequence[Segment]:
        return self._records.rows_of(seq) if self._records is not None else ()

    def check(self) -> None:
        self._engine.check()
        if self._records is not None:
            self._records.check()


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: the chunks that the scheduler has chosen."""

    ticket: Ticket
    chunks: tuple[ScheduledSegment, ...]


STEP_ROWS = 512  # of one forward pass at most: a long prefill delays a decode by at most a step of so many rows
STEP_SEQUENCES = 256
LEAST_ROWS = 64  # of a step of a pipeline at most, however many stages it has
TICK_S = 1.0  # between ticks, longer than round trips: who waits for its peer for so long no longer keeps its KV memory
_NOTHING = SchedulerOutput((), ())


class StepExecutor:
    """Call `submit` between steps, or from `arrivals`; `next` schedules a step and `run` executes it, or begins to.

    On an engine with several batches under way, `run` returns the answers that have become ready; `notify` tells when
    there are more.

    A segment the engine refuses fails alone; an engine fault fails the segments of its step only. An engine that is
    lost fails everything, what is submitted later included.

    Where `arrivals` is set, plain answers go on unasked (`GoesOn`): the forward of a token begins once it is sampled,
    and its reader asks for it while it runs. Whatever else is asked of the sequence undoes it, and its energy is then
    nobody's.
    """

    def __init__(self, engine: Engine | AsyncEngine, rows: int = STEP_ROWS, meter: StepMeter | None = None) -> None:
        """rows: of a step, at most. meter: of the steps' energy; never raises."""
        self.engine: SequenceEngine = engine
        self._meter = meter
        self._runner = runner_of(engine)
        self._sampler = self._runner if isinstance(self._runner, SamplesAhead) else None
        self.notify = self._runner.notify
        self.depth = self._runner.depth  # steps that should be under way so that no part of the engine waits
        self._under_way: deque[Step] = deque()  # the oldest first
        if self.depth > 1:
            # Several are under way, so that the chunks of one prompt keep all stages of a pipeline at work: together
            # they have as many rows as the one step of another engine.
            rows = min(rows, max(LEAST_ROWS, rows // (self.depth - 1)))
        self.scheduler = Scheduler(rows, STEP_SEQUENCES, block_size=engine.block_size)
        self._next_key = 0
        self._requests: dict[int, ForwardRequest] = {}
        self._parts: dict[int, list[Logits]] = {}  # results so far of segments that the scheduler has chunked
        self._after: dict[int, list[SequenceOp]] = {}  # operations that wait for a segment, by its key
        self._memory = EngineMemory(engine)
        self._memory.running = self.scheduler.running
        self.prefixes = self._memory.prefixes
        self.lost: EngineLost | None = None
        self._refused: Answers = []  # to requests submitted since then
        self.arrivals: Callable[[], None] | None = None  # submits what has come during a forward
        self.all_begun = False  # what the answers of the last `run` will ask for has been begun
        self._unasked: dict[SeqId, int] = {}  # keys of forwards that nobody has asked for yet
        self._asked_late: dict[SeqId, int] = {}  # of those that had run before
        self._faults: dict[SeqId, EngineError] = {}  # of unasked forwards, until their sequences are released
        self._stepped = False  # the last `run` was a forward
        self.steps = 0  # forward passes
        self.rows = 0  # rows in them
        self.last = StepSize()  # size of the last step
        self.free_rows = engine.free_rows()  # as of the last `next`; None without a bound

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._under_way

    @property
    def is_away(self) -> bool:
        return self._sampler is not None and self._sampler.gone is not None

    def took(self, seconds: float) -> None:
        """Record the time of the last `run`, s, with what its answers have cost until they could be continued. By it
        chunks of prompts beside answers are limited, and one owner's rows beside others'. Ignored with several batches
        under way, whose times overlap."""
        if self.depth == 1 and not self._under_way and self._stepped:
            self.scheduler.took(seconds)

    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        if self.lost is not None:
            if isinstance(item, ForwardRequest):
                self._refused.append((item.answer, self.lost))
            return
        if isinstance(item, ForwardRequest):
            if (fault := self._faults.get(item.segment.seq)) is not None:
                self._refused.append((item.answer, fault))
            elif not self._has_begun(item):
                self.prefixes.add(self._add(item), item)
            return
        self._undo(item.seq)
        if item.from_row == 0:
            self._faults.pop(item.seq, None)
        last = self.scheduler.last(item.seq)
        if last is not None and (item.from_row is None or (item.from_row > 0 and self._has_waiting(item.seq))):
            self._after.setdefault(last, []).append(item)
            return
        if item.from_row is not None:
            for key in self.scheduler.cancel(item.seq, item.from_row):
                self._forget(key)  # cancelled by the caller: no answer
            for chunk in self._chunks_under_way(item.seq):
                if chunk.segment.start >= item.from_row and chunk.key in self._requests:
                    self._forget(chunk.key)
            late = self._asked_late.get(item.seq)
            if late is not None and self._requests[late].segment.start >= item.from_row:
                self._forget(late)
            if self.scheduler.stop_restoring(item.seq):
                self._memory.preempt([item.seq])
        self._apply(item)

    def _add(self, request: ForwardRequest) -> int:
        self._next_key += 1
        self._requests[self._next_key] = request
        self._parts[self._next_key] = []
        self.scheduler.add(self._next_key, request.segment, group=request.group)
        return self._next_key

    def _go_on(self, request: ForwardRequest, rows: Rows | EngineError) -> None:
        """Begin what a plain answer goes on with, if that is known."""
        segment, goes_on = request.segment, request.goes_on
        if goes_on is None or request.sampling is None or isinstance(rows, EngineError) or segment.parents is not None:
            return
        row, start = rows[-1], segment.start + len(segment.tokens)
        assert isinstance(row, SampledRow)
        if row.token in goes_on.ends or request.sampling[-1].position + 1 >= goes_on.length:
            return
        if start >= self.engine.info.max_positions or self.scheduler.last(segment.seq) is not None:
            return
        if self._memory.sequences.length(segment.seq) != start:  # it has been shortened since it was asked for
            return
        next_one = Segment(segment.seq, start, (row.token,))
        self._unasked[segment.seq] = self._add(ForwardRequest(next_one, lambda _: None, group=request.group))

    def _has_begun(self, request: ForwardRequest) -> bool:
        """Take over the forward that was begun unasked, if it is this one."""
        key = self._unasked.get(request.segment.seq)
        if key is None:
            return False
        begun = self._requests[key]
        if begun.segment != request.segment or request.join is not None:
            self._undo(request.segment.seq)
            return False
        del self._unasked[request.segment.seq]
        request.energy = begun.energy
        self._requests[key] = request
        if self._parts[key]:
            self._asked_late[request.segment.seq] = key
        return True

    def _undo(self, seq: SeqId) -> None:
        """Drop what was begun unasked, with its row."""
        if (key := self._unasked.pop(seq, None)) is None:
            return
        self.submit(SequenceOp.truncate(seq, self._requests[key].segment.start))
        if key in self._requests:  # it has run
            self._forget(key)

    def _has_waiting(self, seq: SeqId) -> bool:
        """True if a prune waits for a segment of this sequence; later row numbers then count the rows after it."""
        return any(op.seq == seq for ops in self._after.values() for op in ops)

    def _chunks_under_way(self, seq: SeqId) -> Iterator[ScheduledSegment]:
        return (chunk for step in self._under_way for chunk in step.chunks if chunk.segment.seq == seq)

    def _apply(self, op: SequenceOp) -> None:
        horizon: int | None = None  # the greatest id of the sequence's rows under way
        for chunk in self._chunks_under_way(op.seq):
            if chunk.segment.parents is not None:
                horizon = chunk.segment.node_ids[-1]
        try:
            op.act(self._memory.sequences, horizon)
        except Exception:  # the thread must survive; the sequence's next segment will be refused
            log.exception("could not change sequence %s", op.seq)

    def next(self) -> SchedulerOutput | None:
        """Schedule the next step; empty if only answers are to be taken. None when nothing is pending, nothing fits
        until memory is released or `tick`, or the engine has enough to do."""
        if self._refused or self._asked_late:
            return _NOTHING  # they are answered before the next step
        if self.lost is not None:
            return None
        scheduled = self.scheduler.schedule(self._memory) if len(self._under_way) < self.depth else None
        if self._meter is not None and scheduled is not None and not self._under_way:
            self._meter.begin()
        self.free_rows = self.engine.free_rows()
        return _NOTHING if scheduled is None and self._is_ready else scheduled

    @property
    def _is_ready(self) -> bool:
        """The oldest step has run."""
        return bool(self._under_way) and self._runner.is_ready(self._under_way[0].ticket)

    def run(self, scheduled: SchedulerOutput) -> Answers:
        answers, self._refused = self._refused, []
        answers += [
            (self._forget(key).answer, EngineError("the request does not fit in the engine's memory"))
            for key in scheduled.rejected
        ]
        before, self._stepped = self._next_key, bool(scheduled.segments)
        if scheduled.segments:
            answers += self._begin(scheduled.segments)
        if self._unasked and self.arrivals is not None and self._is_ready:
            self.prefixes.export()  # of sequences that may be released then
            self.arrivals()
        while self._is_ready:
            answers += self._finish()
        if self._asked_late:
            if not self._stepped:
                self.last = StepSize()  # they are of an earlier step
            answers += self._answered([done for key in [*self._asked_late.values()] for done in self._done(key)])
        self.all_begun = 0 < len(answers) == sum(key > before for key in self._unasked.values())
        return answers

    def _begin(self, chunks: tuple[ScheduledSegment, ...]) -> Answers:
        """Submit a step. Answers come of what could not be."""
        if self.lost is not None:
            return []  # in the first half of this step
        try:
            ticket = self._runner.submit(Batch(tuple(chunk.segment for chunk in chunks)))
            self._under_way.append(Step(ticket, chunks))
            if self._sampler is not None:
                self._sampler.sample_ahead(ticket, [rows_ahead(self._requests.get(each.key), each) for each in chunks])
        except EngineLost as error:
            return self.give_up(error)
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
                self.prefixes.done(chunk)
                for op in self._after.pop(chunk.key, ()):
                    self._apply(op)
        return []

    def _finish(self) -> Answers:
        """Take the result of the oldest step."""
        step = self._under_way.popleft()
        try:
            output = self._runner.collect(step.ticket)
        except EngineLost as error:
            return self.give_up(error)
        except EngineRefusal as refusal:
            return self._fail(step.chunks, refusal)
        except Exception as error:
            log.exception("a step failed")
            return self._fail(step.chunks, EngineError(f"the engine failed: {error}"))
        num_rows = sum(len(chunk.segment.tokens) for chunk in step.chunks)
        self.steps += 1
        self.rows += num_rows
        self.last = StepSize(num_rows, len(step.chunks))
        done: list[tuple[ForwardRequest, Done]] = []
        computed: list[tuple[ForwardRequest, int]] = []  # with the rows of the step that were theirs
        scored = output.scored or (None,) * len(step.chunks)
        for chunk, logits, rows in zip(step.chunks, output.logits, scored, strict=True):
            request = self._requests.get(chunk.key)
            if request is None:
                continue  # cancelled under way, or computed again for nobody
            computed.append((request, len(chunk.segment.tokens)))
            if logits:
                self._parts[chunk.key].append(logits)
            if chunk.final and self._unasked.get(chunk.segment.seq) != chunk.key:
                request.scored = rows
                done += self._done(chunk.key)
        answers = self._answered(done)  # before the meter is read: a GPU computes until its tokens are
        if self._meter is not None:
            energy = self._meter.end([chunk.segment for chunk in step.chunks])
            for request, own_rows in computed:
                request.energy = request.energy.plus(energy.share(own_rows, num_rows))
        return answers

    def _done(self, key: int) -> list[tuple[ForwardRequest, Done]]:
        parts = tuple(self._parts[key])
        request = self._forget(key)
        return [(request, done) for done in done_of(request, parts)]

    def _answered(self, done: Sequence[tuple[ForwardRequest, Done]]) -> Answers:
        """The answers to requests that have run, of whose owners each has its turn; those that go on are continued."""
        owners = ["" if request.group is None else request.group.owner for request, _ in done]
        in_turn = Turns().order(list(zip(owners, done, strict=True)))
        answers = answers_of(self.engine, [each for _, each in in_turn])
        if self.arrivals is not None and self.depth == 1:
            for (request, _), (_, rows) in zip(in_turn, answers, strict=True):
                self._go_on(request, rows)
        return answers

    def check(self) -> None:
        """Assert the invariants of the engine and of what is known of it."""
        self._memory.check()
        self.scheduler.check()

    def _fail(self, chunks: tuple[ScheduledSegment, ...], error: EngineError) -> Answers:
        """Fail these segments and the pending ones of their sequences."""
        failed = {chunk.key for chunk in chunks if chunk.key != RECOMPUTED}
        for chunk in chunks:
            failed.update(self.scheduler.cancel(chunk.segment.seq))
        self._faults |= {seq: error for seq, key in self._unasked.items() if key in failed}  # for whoever asks
        return [(self._forget(key).answer, error) for key in sorted(failed & self._requests.keys())]

    def give_up(self, error: EngineLost) -> Answers:
        """Fail every request, and all later ones. In any state: nothing is scheduled any more."""
        log.critical("the engine is lost: %s", error)
        self.lost = error
        requests, self._requests = self._requests, {}
        self._unasked, self._asked_late = {}, {}
        return [(requests[key].answer, error) for key in sorted(requests)]

    def _forget(self, key: int) -> ForwardRequest:
        del self._parts[key]
        self.prefixes.forget(key)
        self._after.pop(key, None)
        request = self._requests.pop(key)
        for keys in (self._unasked, self._asked_late):
            if keys.get(request.segment.seq) == key:
                del keys[request.segment.seq]
        return request
