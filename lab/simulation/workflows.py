"""Workflows in virtual time: drives the scheduler of `paceline.workflow` on units that take what is true.

What is true may differ from the profiles that the scheduler has. Launches on one memory slow each other down by the
bandwidth that they ask for together (HeRo, eq. 1 and 2), of which the scheduler knows nothing. What agents decide and
how long texts are is told by a script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from paceline.workflow.graph import (
    Cancel,
    Ended,
    Failed,
    Launch,
    Outcome,
    ProcessingUnit,
    Stage,
    StagesAdded,
    StagesDone,
    Unrunnable,
    WorkflowEvent,
)
from paceline.workflow.profiles import Key, OperationProfile
from paceline.workflow.scheduler import WorkflowScheduler


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Factor on a launch's seconds by the bandwidth that all launches on its memory ask for (phi of eq. 1).

    1 up to the first knot, linear between knots; beyond the last one, the last slope goes on.
    """

    knots: tuple[float, ...] = ()  # GB/s, rising
    factors: tuple[float, ...] = ()  # at the knots; the first is 1, none is below the one before

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.knots))
        monotone = all(a <= b for a, b in pairwise((1.0, *self.factors)))
        begins = not self.factors or self.factors[0] == 1.0
        if len(self.knots) != len(self.factors) or not (rising and monotone and begins):
            raise ValueError("a slowdown has rising knots and factors that begin at 1 and do not fall")

    def at(self, bandwidth: float) -> float:
        """Factor at so many GB/s."""
        knots, factors = self.knots, self.factors
        if not knots or bandwidth <= knots[0]:
            return 1.0
        i = 1
        while i < len(knots) - 1 and bandwidth > knots[i]:
            i += 1
        if i >= len(knots):
            return factors[-1]
        slope = (factors[i] - factors[i - 1]) / (knots[i] - knots[i - 1])
        return factors[i - 1] + slope * (bandwidth - knots[i - 1])


@dataclass(frozen=True, slots=True)
class Truth:
    """Seconds of an operation on a kind of unit, and the bandwidth that it asks of its memory."""

    profile: OperationProfile  # alone on the memory
    bandwidth: Mapping[int, float] = field(default_factory=dict)  # shape -> GB/s
    slowdown: Slowdown = Slowdown()

    def gb_s(self, shape: int) -> float:
        """GB/s that a launch of a shape asks for; between known shapes linear, beyond them as of the nearest."""
        known = sorted(self.bandwidth.items())
        if not known:
            return 0.0
        for (low, less), (high, more) in pairwise(known):
            if low <= shape <= high:
                return less + (more - less) * (shape - low) / (high - low)
        return known[0][1] if shape < known[0][0] else known[-1][1]


class Script(Protocol):
    """The truth about a workflow that the scheduler does not know."""

    def items(self, stage: Stage, first: int, count: int) -> int:
        """How many of a launch's items there are; at least 1."""

    def after(self, stage: Stage, done: int) -> Outcome:
        """The outcome of a stage of which so many items are done."""


@dataclass(slots=True)
class Ran:
    """A launch, under way or ended."""

    launch: Launch
    private: bool
    memory: str
    truth: Truth
    items: int
    began: float  # s
    moving_s: float  # left
    compute_s: float  # left, alone on the memory
    ended: float = math.nan

    @property
    def stage(self) -> Stage:
        return self.launch.stage

    @property
    def gb_s(self) -> float:
        return self.truth.gb_s(self.launch.shape)


@dataclass(slots=True)
class WorkflowSimulation:
    """One request in virtual time."""

    scheduler: WorkflowScheduler
    units: Sequence[ProcessingUnit]
    truth: Mapping[Key, Truth]
    script: Script
    jitter: Callable[[Launch], float] = lambda _: 1.0  # factor on a launch's seconds
    now: float = 0.0
    ran: list[Ran] = field(default_factory=list)
    done: bool = False
    _running: dict[int, Ran] = field(default_factory=dict)

    def run(self, first: Sequence[Stage]) -> float:
        """Seconds until all is finished. Raises RuntimeError where the scheduler stands still or breaks a rule."""
        self._tell(StagesAdded(self.now, first))
        while self._running:
            running = min(self._running.values(), key=lambda each: (self._end_of(each), each.launch.id))
            self._advance(self._end_of(running))
            running.ended = self.now
            self.ran.append(self._running.pop(running.launch.id))
            stage = running.stage
            outcome = self.script.after(stage, stage.progress.done + running.items)
            told = Outcome(running.items, outcome.finished, outcome.added, outcome.dropped)
            self._tell(Ended(self.now, running.launch.id, told))
        if not self.done:
            raise RuntimeError("the workflow stands still")
        return self.now

    def _rate(self, running: Ran) -> float:
        """Slowdown of a launch by all on its memory. One that still moves its data counts: it will ask soon."""
        used = sum(each.gb_s for each in self._running.values() if each.memory == running.memory)
        return running.truth.slowdown.at(used)

    def _end_of(self, running: Ran) -> float:
        return self.now + running.moving_s + running.compute_s * self._rate(running)

    def _advance(self, now: float) -> None:
        rates = {each.launch.id: self._rate(each) for each in self._running.values()}
        for each in self._running.values():
            moving = min(now - self.now, each.moving_s)
            each.moving_s -= moving
            each.compute_s = max(0.0, each.compute_s - (now - self.now - moving) / rates[each.launch.id])
        self.now = now

    def _tell(self, event: WorkflowEvent) -> None:
        for effect in self.scheduler.on(event):
            match effect:
                case Launch():
                    self._begin(effect)
                case Cancel():
                    if self._running.pop(effect.launch, None) is not None:
                        self._tell(Failed(self.now, effect.launch))
                case StagesDone():
                    self.done = True
                case Unrunnable():
                    raise RuntimeError(f"no unit may run {effect.stage}")

    def _begin(self, launch: Launch) -> None:
        stage, operation = launch.stage, launch.stage.operation
        unit = next(unit for unit in self.units if unit.name == launch.unit)
        private = self.scheduler.graph.is_private(stage)
        if any(each.launch.unit == unit.name for each in self._running.values()) or not unit.may_run(
            operation.model, private=private
        ):
            raise RuntimeError(f"{launch} on a unit that is busy or may not run it")
        truth = self.truth.get((operation.name, unit.kind))
        if truth is None:
            raise RuntimeError(f"nothing is true of {operation.name} on {unit.kind}")
        items = self.script.items(stage, launch.first, launch.count)
        moving = 0.0 if operation.open_ended else unit.transfer_s(items * operation.item_bytes)
        seconds = truth.profile.seconds(items) * self.jitter(launch)
        self._running[launch.id] = Ran(launch, private, unit.memory, truth, items, self.now, moving, seconds)
