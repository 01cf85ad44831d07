"""An engine that runs one batch after the other, as one that has batches under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.core.batching.segment import Batch
from paceline.engine.base import AsyncEngine, BatchRunner, Engine, Output, Ticket


class ImmediateRunner:
    """Runs each batch of an engine when it is submitted."""

    depth = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = 0
        self._outputs: deque[tuple[Ticket, Output]] = deque()

    def submit(self, batch: Batch) -> Ticket:
        output = self._engine.forward(batch)
        self._last += 1
        self._outputs.append((Ticket(self._last), output))
        return Ticket(self._last)

    def is_ready(self, ticket: Ticket) -> bool:
        return bool(self._outputs) and self._outputs[0][0] == ticket

    def collect(self, ticket: Ticket) -> Output:
        oldest, output = self._outputs.popleft()
        assert oldest == ticket, f"batch {oldest} comes before {ticket}"
        return output

    def notify(self, callback: Callable[[], None]) -> None:
        """Never calls: every batch is ready when `submit` returns."""


def runner_of(engine: Engine | AsyncEngine) -> BatchRunner:
    return engine if isinstance(engine, BatchRunner) else ImmediateRunner(engine)
