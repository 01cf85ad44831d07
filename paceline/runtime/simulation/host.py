"""A host: an engine in virtual time, whose steps batch the segments of all machines that run on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from paceline.core.batching.groups import Group
from paceline.core.batching.segment import SeqId
from paceline.engine.base import Engine
from paceline.runtime.engine_loop.executor import TICK_S, StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, SequenceOp
from paceline.runtime.simulation.clock import VirtualClock

StepTime = float | Callable[[int], float]  # s of a forward pass: a constant, or a function of its rows


class SimulatedHost:
    def __init__(
        self, clock: VirtualClock, name: str, engine: Engine, *, forward: StepTime = 0.01, search: float = 0.0
    ) -> None:
        """search: s of a retrieval."""
        self.name = name
        self.forward: StepTime = forward  # may be changed between events
        self.search = search
        self.steps = StepExecutor(engine)
        self._clock = clock
        self._inbox: list[SequenceOp | ForwardRequest] = []
        self._stepping = False
        self._next_seq = 0
        self._next_group = 0
        self._ticking = False

    @property
    def idle(self) -> bool:
        return not self._stepping and not self._inbox

    def allocate(self) -> SeqId:
        self._next_seq += 1
        return SeqId(self._next_seq)

    def group(self, rows: int, line: tuple[Hashable, int] | None) -> Group:
        self._next_group += 1
        return Group(self._next_group, rows, line=line)

    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        self._inbox.append(item)
        if not self._stepping:
            self._stepping = True
            self._clock.after(0.0, self._step)

    def step_time(self, rows: int) -> float:
        """Seconds of a forward pass of so many rows."""
        return self.forward(rows) if callable(self.forward) else self.forward

    def check_released(self) -> None:
        """Raise AssertionError if the engine still holds a sequence, once all machines have ended."""
        for item in self._inbox:
            self.steps.submit(item)
        self._inbox = []
        self.steps.check()
        left = [seq for seq in range(1, self._next_seq + 1) if self.steps.engine.length(SeqId(seq))]
        assert not left, f"{self.name} leaks sequences {left}"

    def _step(self) -> None:
        """Submit what has come since the last step, and run the next one for its time."""
        items, self._inbox = self._inbox, []
        for item in items:
            self.steps.submit(item)
        scheduled = self.steps.next()
        if self.steps.short and not self._ticking:
            self._ticking = True
            self._clock.after(TICK_S, self._tick)
        if scheduled is None:
            self._stepping = False
            return

        def ran() -> None:
            for answer, result in self.steps.run(scheduled):
                answer(result)
            self._step()

        rows = sum(len(piece.segment.tokens) for piece in scheduled.segments)
        self._clock.after(self.step_time(rows), ran)

    def _tick(self) -> None:
        self._ticking = False
        self.steps.tick()
        if not self._stepping:
            self._stepping = True
            self._step()
