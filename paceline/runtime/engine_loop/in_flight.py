"""Batches of one engine that are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.batching.scheduler import ScheduledSegment
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.row import RowSampling
from paceline.engine.base import BatchRunner, Output, SamplesAhead, Ticket


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: the chunks that the scheduler has chosen."""

    ticket: Ticket
    chunks: tuple[ScheduledSegment, ...]


class InFlight:
    """Oldest first."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._steps: deque[Step] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def depth(self) -> int:
        return self._runner.depth

    @property
    def has_room(self) -> bool:
        return len(self._steps) < self.depth

    @property
    def is_ready(self) -> bool:
        """The oldest batch has run."""
        return bool(self._steps) and self._runner.is_ready(self._steps[0].ticket)

    def submit(
        self,
        chunks: tuple[ScheduledSegment, ...],
        rows_of: Callable[[ScheduledSegment], tuple[RowSampling, ...] | None],
    ) -> None:
        """rows_of: how the wanted rows of a chunk will be sampled, where that is known. Raises EngineError for a batch
        that the engine refuses."""
        ticket = self._runner.submit(Batch(tuple(chunk.segment for chunk in chunks)))
        self._steps.append(Step(ticket, chunks))
        if isinstance(self._runner, SamplesAhead):
            self._runner.sample_ahead(ticket, [rows_of(chunk) for chunk in chunks])

    def pop(self) -> Step:
        return self._steps.popleft()

    def collect(self, step: Step) -> Output:
        return self._runner.collect(step.ticket)

    def horizon(self, seq: SeqId) -> int | None:
        """The greatest id of the sequence's rows under way; None: no row of a tree is."""
        found: int | None = None
        for step in self._steps:
            for chunk in step.chunks:
                if chunk.segment.seq == seq and chunk.segment.parents is not None:
                    found = chunk.segment.node_ids[-1]
        return found

    def keys(self, seq: SeqId, from_row: int) -> list[int]:
        """Of segments under way with rows from `from_row` on alone."""
        chunks = (chunk for step in self._steps for chunk in step.chunks if chunk.segment.seq == seq)
        return [chunk.key for chunk in chunks if chunk.segment.start >= from_row]
