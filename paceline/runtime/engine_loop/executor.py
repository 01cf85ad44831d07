"""From submitted segments to forward passes and answers: what the engine's thread does, without the thread.

`worker.EngineWorker` runs it on a thread in real time, `world.World` in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.batching.scheduler import Group, ScheduledSegment, Scheduler, SchedulerOutput
from paceline.core.batching.segment import Batch, Segment, SeqId, StepSize
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.prefix_reuse import PrefixReuse, StoredPrefix

log = logging.getLogger("paceline.engine")

Answer = Callable[[tuple[Dist, ...] | EngineError], None]
Answers = list[tuple[Answer, tuple[Dist, ...] | EngineError]]

TOKEN_BUDGET = 512  # rows a step: a long prefill holds a decode up for no longer than a step of this size
MAX_SEGMENTS = 256


@dataclass(frozen=True, slots=True)
class SequenceOp:
    """Something to do to a sequence between two steps. Rows from `from_row` on that have not run are void.

    None: none are void, and it is done once they have run; what is asked for after it waits for that as well.
    """

    seq: SeqId
    from_row: int | None
    act: Callable[[Engine], None]

    @staticmethod
    def truncate(seq: SeqId, length: int) -> SequenceOp:
        def act(engine: Engine) -> None:
            if engine.length(seq) > length:  # the forward that would have written the rows may never have run
                engine.truncate(seq, length)

        return SequenceOp(seq, length, act)

    @staticmethod
    def commit(seq: SeqId, keep: tuple[int, ...], rest: tuple[int, ...] = ()) -> SequenceOp:
        return SequenceOp(seq, None, lambda engine: engine.commit(seq, keep, rest))

    @staticmethod
    def release(seq: SeqId) -> SequenceOp:
        return SequenceOp(seq, 0, lambda engine: engine.release(seq))


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    segment: Segment
    answer: Answer
    prefix: StoredPrefix | None = None  # what the segment may begin with, if it is a whole prompt
    group: Group | None = None  # of sequences that end together


class StepExecutor:
    """`take` between steps only; `next` chooses a step's batch and `run` executes it.

    A segment the engine refuses fails alone; a fault in the engine fails its step, and nothing else.
    """

    def __init__(self, engine: Engine, *, token_budget: int = TOKEN_BUDGET) -> None:
        self.engine = engine
        self._scheduler = Scheduler(token_budget, MAX_SEGMENTS, block_size=engine.block_size)
        self._next_key = 0
        self._answers: dict[int, Answer] = {}
        self._parts: dict[int, list[Dist]] = {}  # of segments that the scheduler has cut
        self._after: dict[int, list[SequenceOp]] = {}  # what waits for a segment, by its key
        self._prefixes = PrefixReuse(engine)
        self.steps = 0  # forward passes so far
        self.rows = 0  # rows in them
        self.last = StepSize()  # what ran together last

    @property
    def adopted(self) -> int:
        """Rows that were stored, and so need not be computed, so far."""
        return self._prefixes.adopted

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def has_begun(self, group: Group) -> bool:
        """Has any of its rows run? May be asked from any thread."""
        return self._scheduler.has_begun(group)

    def lacks_memory(self, group: Group) -> bool:
        """Does it wait for memory, not for its turn? As of the last step; may be asked from any thread."""
        return self._scheduler.lacks_memory(group)

    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        if isinstance(item, ForwardRequest):
            self._next_key += 1
            self._answers[self._next_key] = item.answer
            self._parts[self._next_key] = []
            ready = self._prefixes.add(self._next_key, item.segment, item.prefix)
            self._scheduler.add(self._next_key, item.segment, num_cached_tokens=ready, group=item.group)
            return
        last = self._scheduler.last(item.seq)
        if last is not None and (item.from_row is None or (item.from_row > 0 and self._is_awaited(item.seq))):
            self._after.setdefault(last, []).append(item)
            return
        if item.from_row is not None:
            for key in self._scheduler.cancel(item.seq, item.from_row):
                self._forget(key)  # void: whoever changed the sequence knows
        self._act(item)

    def _is_awaited(self, seq: SeqId) -> bool:
        """Does a commit wait for a segment of this sequence? Then rows are counted as they will be after it."""
        return any(control.seq == seq for controls in self._after.values() for control in controls)

    def _act(self, control: SequenceOp) -> None:
        try:
            control.act(self.engine)
        except Exception:  # the thread must live; the sequence's next segment will be refused
            log.exception("could not change sequence %s", control.seq)

    def next(self) -> SchedulerOutput | None:
        """The next step; None when nothing is pending or nothing fits before something is released."""
        return self._scheduler.schedule(self.engine.free_rows(), self.engine.length)

    def run(self, scheduled: SchedulerOutput) -> Answers:
        answers: Answers = [
            (self._forget(key), EngineError("the request does not fit in the engine's memory"))
            for key in scheduled.rejected
        ]
        if not scheduled.segments:
            return answers
        return answers + self._forward(self._prefixes.adopt(scheduled.segments))

    def export_prefixes(self) -> None:
        """After the answers of a step are out and before anything else is taken: what can wait until then."""
        self._prefixes.export()

    def _forward(self, pieces: tuple[ScheduledSegment, ...]) -> Answers:
        batch = Batch(tuple(piece.segment for piece in pieces))
        try:
            output = self.engine.forward(batch)
        except EngineError as error:
            if len(pieces) > 1:  # a refusal changes nothing: let those through that can be served
                return [answer for piece in pieces for answer in self._forward((piece,))]
            log.warning("a segment was refused: %s", error)
            return self._fail(pieces, error)
        except Exception as fault:
            # Whatever it is, those who wait must hear of it: an answer that never comes is worse than one that fails.
            log.exception("a step failed")
            return self._fail(pieces, EngineError(f"the engine failed: {fault}"))
        self.steps += 1
        self.rows += batch.num_rows
        self.last = StepSize(batch.num_rows, len(pieces))
        answers: Answers = []
        for piece, dists in zip(pieces, output.dists, strict=True):
            self._parts[piece.key].extend(dists)
            if piece.final:
                parts = tuple(self._parts[piece.key])
                self._prefixes.done(piece)
                for control in self._after.get(piece.key, ()):
                    self._act(control)
                answers.append((self._forget(piece.key), parts))
        return answers

    def _fail(self, pieces: tuple[ScheduledSegment, ...], error: EngineError) -> Answers:
        """These, and what was to follow them in their sequences."""
        failed = {piece.key for piece in pieces}
        for piece in pieces:
            failed.update(self._scheduler.cancel(piece.segment.seq))
        return [(self._forget(key), error) for key in sorted(failed)]

    def _forget(self, key: int) -> Answer:
        del self._parts[key]
        self._prefixes.forget(key)
        self._after.pop(key, None)
        return self._answers.pop(key)
