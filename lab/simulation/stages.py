"""An engine cut into stages, in virtual time: several batches under way, each at one stage.

The rows are computed when they are submitted, by an engine that is not cut; what is simulated is when each stage has
them, and so when the answer comes. A stage runs one batch after the other, for a time that depends on the rows that no
prune has dropped by then; news of a prune takes as long to reach a stage as a hop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lab.engines import WrappedEngine
from lab.simulation.clock import VirtualClock
from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import DenseLogits, Engine, Logits, Output, Ticket


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of a pipeline's parts, s."""

    count: int  # stages
    stage: Callable[[int], float]  # a stage's forward pass of so many rows, at least one
    hop: float = 0.0  # from the head to the first stage, from stage to stage, and from the last to the head


@dataclass(slots=True, eq=False)
class _Work:
    ticket: Ticket
    batch: Batch
    output: Output
    dropped: dict[tuple[SeqId, int], float] = field(default_factory=dict)  # rows by id, and when a prune dropped them
    unscored: set[tuple[SeqId, int]] = field(default_factory=set)  # of these: those that the last stage did not run
    ready: bool = False

    def known_dropped(self, before: float) -> set[tuple[SeqId, int]]:
        return {name for name, time in self.dropped.items() if time <= before}


class SimulatedStages(WrappedEngine):
    """`AsyncEngine` of stages; its batches are under way in the clock's time."""

    def __init__(self, inner: Engine, clock: VirtualClock, times: StageTimes) -> None:
        super().__init__(inner)
        self._clock, self._times = clock, times
        self._last = 0
        self._under_way: deque[_Work] = deque()  # oldest first
        self._queues: list[deque[_Work]] = [deque() for _ in range(times.count)]  # waiting at each stage
        self._busy = [False] * times.count
        self._callbacks: list[Callable[[], None]] = []
        self.busy_s = [0.0] * times.count  # of each stage so far

    # ---- batches ----------------------------------------------------------------------------------------------------
    @property
    def depth(self) -> int:
        """One batch more than stages, as of `runtime.stages.pipeline`: it waits at the first one."""
        return self._times.count + 1

    def submit(self, batch: Batch) -> Ticket:
        output = self._inner.forward(batch)
        self._last += 1
        work = _Work(Ticket(self._last), batch, output)
        self._under_way.append(work)
        self._clock.after(self._times.hop, lambda: self._arrive(0, work))
        return work.ticket

    def is_ready(self, ticket: Ticket) -> bool:
        return bool(self._under_way) and self._under_way[0].ticket == ticket and self._under_way[0].ready

    def collect(self, ticket: Ticket) -> Output:
        work = self._under_way.popleft()
        assert work.ticket == ticket and work.ready, "in virtual time nobody waits"
        return _without(work) if work.unscored else work.output

    def notify(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    # ---- changes ----------------------------------------------------------------------------------------------------
    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        super().prune(seq, keep, live, horizon)
        if horizon is None:
            return
        kept = {*keep, *live}
        for work in self._under_way:
            for segment in work.batch.segments:
                if segment.seq == seq and segment.parents is not None:
                    for name in segment.node_ids:
                        if name <= horizon and name not in kept:
                            work.dropped.setdefault((seq, name), self._clock.now)

    # ---- stages -----------------------------------------------------------------------------------------------------
    def _arrive(self, stage: int, work: _Work) -> None:
        if stage == self._times.count:
            work.ready = True
            for callback in self._callbacks:
                callback()
            return
        self._queues[stage].append(work)
        self._clock.at(self._clock.now, lambda: self._begin(stage), last=True)

    def _begin(self, stage: int) -> None:
        """Run the next batch, unless one runs. Behind all else of this time: a prune is known where a batch begins."""
        if self._busy[stage] or not self._queues[stage]:
            return
        work = self._queues[stage].popleft()
        dropped = work.known_dropped(self._clock.now - self._times.hop)
        rows = work.batch.num_rows - len(dropped)
        seconds = self._times.stage(rows) if rows else 0.0
        if stage == self._times.count - 1:
            work.unscored = dropped
        self._busy[stage] = True
        self.busy_s[stage] += seconds

        def ran() -> None:
            self._busy[stage] = False
            self._clock.after(self._times.hop, lambda: self._arrive(stage + 1, work))
            self._clock.at(self._clock.now, lambda: self._begin(stage), last=True)

        self._clock.after(seconds, ran)


def _without(work: _Work) -> Output:
    """The output without the rows that the last stage did not run; whole where an engine's logits cannot be parted."""
    parts: list[Logits] = []
    kept: list[tuple[int, ...] | None] = []
    scored = work.output.scored or (None,) * len(work.batch.segments)
    for segment, logits, rows in zip(work.batch.segments, work.output.logits, scored, strict=True):
        wanted = segment.logits_rows() if segment.parents is not None else ()
        left = [i for i, row in enumerate(wanted) if (segment.seq, segment.node_ids[row]) not in work.unscored]
        if rows is not None or len(left) == len(wanted) or not isinstance(logits, DenseLogits):
            parts.append(logits)
            kept.append(rows)
            continue
        parts.append(DenseLogits(tuple(logits.rows[i] for i in left)))
        kept.append(tuple(left))
    return Output(tuple(parts), tuple(kept))
