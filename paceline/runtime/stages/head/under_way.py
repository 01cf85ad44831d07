"""What a head waits for: batches that are under way, and requests to single stages. Guarded by the head's condition."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.batching.segment import Batch
from paceline.core.sampling.row import RowSampling
from paceline.engine.base import Ticket
from paceline.errors import EngineError
from paceline.wire.fields import Frame
from paceline.wire.stages.messages import ImportRows
from paceline.wire.stages.pipe import Bulk
from paceline.wire.stages.sampling import BatchDone

AheadRows = tuple[RowSampling, ...] | None


@dataclass(slots=True, eq=False)
class BatchUnderWay:
    ticket: Ticket
    asked: Batch
    ahead: Sequence[AheadRows] = ()  # how its rows will be sampled, by segment
    done: BatchDone | None = None
    error: EngineError | None = None

    @property
    def is_ready(self) -> bool:
        return self.done is not None or self.error is not None


@dataclass(slots=True, eq=False)
class StageRequest:
    """A question to one stage, asked again after a loss."""

    place: int  # of the stage; -1: the last
    message: Frame
    payload: tuple[Frame, bytes] | None = None
    answer: Frame | Bulk | None = None
    error: EngineError | None = None

    @property
    def is_open(self) -> bool:
        return self.answer is None and self.error is None

    @property
    def is_again(self) -> bool:
        """To be asked again after a loss: not answered yet, or of rows that an emptied stage holds no more, while
        other stages have not answered."""
        return self.is_open or (self.error is None and isinstance(self.message, ImportRows))


@dataclass(slots=True)
class UnderWay:
    batches: deque[BatchUnderWay] = field(default_factory=deque)  # oldest first
    requests: dict[int, StageRequest] = field(default_factory=dict)

    def batch(self, ticket: int) -> BatchUnderWay | None:
        return next((each for each in self.batches if each.ticket == ticket), None)

    def done(self, message: BatchDone) -> None:
        """A batch has run. One that has run before was computed again."""
        under = self.batch(message.ticket)
        if under is None or under.is_ready:
            return
        if message.error is not None:
            under.error = EngineError(message.error)
            return
        count = len(under.asked.segments)
        if not len(message.kept) == len(message.sizes) == len(message.sampled) == count:
            under.error = EngineError("the last stage answered with other rows")
            return
        under.done = message

    def answer(self, number: int, found: Frame | Bulk | EngineError) -> None:
        request = self.requests.get(number)
        if request is None:
            return
        if isinstance(found, EngineError):
            request.error = found
        else:
            request.answer = found

    def fail(self, reason: str) -> None:
        """Everything that is not answered yet."""
        for under in self.batches:
            if not under.is_ready:
                under.error = EngineError(reason)
        for request in self.requests.values():
            if request.is_open:
                request.error = EngineError(reason)
