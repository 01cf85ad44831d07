"""A host: an engine in virtual time, whose steps batch the segments of all machines that run on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from lab.simulation.clock import VirtualClock
from lab.simulation.stages import SimulatedStages, StageTimes
from paceline.core.batching.pending import Group
from paceline.core.batching.segment import SeqId
from paceline.core.energy import AnswerEnergy, PowerMeter
from paceline.engine.base import Engine
from paceline.runtime.engine_loop.executor import TICK_S, StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, SequenceOp


class Watts(NamedTuple):
    """Powers of a host."""

    compute: float = 12.0  # W, while its engine runs; by default those of GELATO's Table I
    send: float = 0.2  # W, while it sends


YIELD_S = 1e-6  # s, in which what follows from the end of a step has happened


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a forward pass: reading the weights, computing its rows, and reading the KV of its sequences."""

    base_s: float
    row_s: float = 0.0
    sequence_s: float = 0.0

    def seconds(self, rows: int, sequences: int) -> float:
        return self.base_s + self.row_s * rows + self.sequence_s * sequences


StepTime = float | Callable[[int], float] | StepCost  # s of a forward pass: constant, of its rows, or of sequences too


@dataclass(slots=True)
class Accelerator:
    """What the engines of several hosts compute on, one step at a time."""

    last: str = ""  # host whose steps go behind all others': it begins one when the others have nothing to compute
    free_at: float = 0.0  # s
    busy_s: float = 0.0  # of all steps


class SimulatedHost:
    def __init__(
        self,
        clock: VirtualClock,
        name: str,
        engine: Engine,
        *,
        forward: StepTime = 0.01,
        stages: StageTimes | None = None,
        search: float = 0.0,
        watts: Watts | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """stages: the engine is cut into these, in place of `forward`. search: s of a retrieval. watts: machines are
        told the joules that these powers model; None: they are not. accelerator: shared with other hosts; None: its
        own."""
        self.name = name
        self.accelerator = accelerator or Accelerator()
        self._shares = accelerator is not None
        self.forward: StepTime = forward  # may be changed between events
        self.search = search
        self._watts = watts
        meter = None if watts is None else PowerMeter("power", lambda: watts.compute, lambda: clock.now, measured=False)
        self.steps = StepExecutor(engine if stages is None else SimulatedStages(engine, clock, stages), meter=meter)
        self.steps.notify(self._wake)
        self._overlaps = stages is not None
        self._clock = clock
        self._inbox: list[SequenceOp | ForwardRequest] = []
        self._stepping = False
        self._next_seq = 0
        self._next_group = 0
        self._ticking = False

    @property
    def idle(self) -> bool:
        return not self._stepping and not self._inbox and (self.steps.idle or not self._overlaps)

    def allocate(self) -> SeqId:
        self._next_seq += 1
        return SeqId(self._next_seq)

    def account(self) -> AnswerEnergy:
        """An account of the energy of one answer."""
        return AnswerEnergy("", 0.0) if self._watts is None else AnswerEnergy("power", self._watts.send)

    def group(self, rows: int, line: tuple[Hashable, int] | None) -> Group:
        self._next_group += 1
        return Group(self._next_group, rows, line=line)

    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        self._inbox.append(item)
        if not self._stepping:
            self._stepping = True
            self._clock.after(0.0, self._step)

    def step_time(self, rows: int, sequences: int = 1) -> float:
        """Seconds of a forward pass of so many rows."""
        if isinstance(self.forward, StepCost):
            return self.forward.seconds(rows, sequences)
        return self.forward(rows) if callable(self.forward) else self.forward

    def check_released(self) -> None:
        """Raise AssertionError if the engine still holds a sequence, once all machines have ended."""
        for item in self._inbox:
            self.steps.submit(item)
        self._inbox = []
        self.steps.check()
        left = [seq for seq in range(1, self._next_seq + 1) if self.steps.engine.length(SeqId(seq))]
        assert not left, f"{self.name} leaks sequences {left}"

    def _step(self, *, waited: bool = False) -> None:
        """Submit what has come since the last step, and run the next one for its time."""
        if self.accelerator.free_at > self._clock.now:  # another host's step; what comes meanwhile joins this one's
            self._clock.at(self.accelerator.free_at, self._step)
            return
        if self.accelerator.last == self.name and not waited:
            self._clock.after(YIELD_S, lambda: self._step(waited=True))
            return
        items, self._inbox = self._inbox, []
        for item in items:
            self.steps.submit(item)
        scheduled = self.steps.next()
        if self._overlaps and scheduled is not None:  # it takes its time on its own
            for answer, result in self.steps.run(scheduled):
                answer(result)
            self._clock.after(0.0, self._step)
            return
        if self.steps.scheduler.short and not self._ticking:
            self._ticking = True
            self._clock.after(TICK_S, self._tick)
        if scheduled is None:
            self._stepping = False
            return

        def ran() -> None:
            for answer, result in self.steps.run(scheduled):
                answer(result)
            if self._shares:
                self._clock.after(0.0, self._step)  # behind a host that has waited for this step
            else:
                self._step()

        rows = sum(len(piece.segment.tokens) for piece in scheduled.segments)
        seconds = self.step_time(rows, len({piece.segment.seq for piece in scheduled.segments}))
        self.accelerator.free_at = self._clock.now + seconds
        self.accelerator.busy_s += seconds
        self._clock.after(seconds, ran)

    def _tick(self) -> None:
        self._ticking = False
        self.steps.scheduler.tick()
        if not self._stepping:
            self._stepping = True
            self._step()

    def _wake(self) -> None:
        """A batch under way has run."""
        if not self._stepping:
            self._stepping = True
            self._clock.after(0.0, self._step)
