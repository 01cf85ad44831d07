"""Which stage is the most critical, and the unit and the shape of its next launch (HeRo, algorithm 1, lines 9 to 16).

A configuration's score is the predicted end of all that is left of the stage there. A busy unit counts with the time
when it is expected to be free: where it wins, the stage waits for it, and idle units only help, with launches that end
before it would.

Other than in the paper: contention for memory does not count in the score (eq. 5's penalty and limit), and criticality
knows no work beyond decisions that are open (eq. 4's expected part): neither has gained anything, see bench/LOG.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from paceline.workflow.graph import Launch, Operation, ProcessingUnit, Stage, StageGraph
from paceline.workflow.profiles import OperationProfile, Profiles

# The shapes in which the work of a stage is cut for a unit (HeRo, eq. 3).


MAX_KNOWN: Final = 4096  # predictions of each kind that are remembered; a profile that has learnt is a new one


@lru_cache(MAX_KNOWN)
def best_shape(profile: OperationProfile, items: int, most: int | None = None, launch_s: float = 0.0) -> int:
    """Shape with the least ceil(items ÷ shape) · seconds(shape); of equal ones the smallest.

    most: items of a launch. launch_s: s, what each launch takes besides, as to a unit elsewhere.
    """
    shapes = [shape for shape in profile.shapes if most is None or shape <= most] or [profile.shapes[0]]
    return min(shapes, key=lambda shape: math.ceil(items / shape) * (profile.seconds(shape) + launch_s))


@lru_cache(MAX_KNOWN)
def seconds_for(profile: OperationProfile, items: int, shape: int) -> float:
    """Seconds for so many items in launches of that shape; the last may have fewer items."""
    whole, rest = divmod(items, shape)
    return whole * profile.seconds(shape) + (profile.seconds(rest) if rest else 0.0)


class Predictions:
    """Shapes of work on a unit, and its seconds there."""

    def __init__(self, profiles: Profiles) -> None:
        self.profiles = profiles

    def shape(self, operation: Operation, items: int, profile: OperationProfile, launch_s: float = 0.0) -> int:
        """The shape of launches for so many items. launch_s: as of `best_shape`."""
        return best_shape(profile, items, operation.group, launch_s)

    def seconds(self, operation: Operation, items: int, kind: str) -> float | None:
        """Seconds of so many items on units of a kind; None without a profile."""
        profile = self.profiles.get(operation.name, kind)
        if profile is None:
            return None
        return seconds_for(profile, items, self.shape(operation, items, profile)) if items > 0 else 0.0


# Which stage the end of the workflow waits for (HeRo, eq. 4): the longest path of predicted seconds from a stage to the
# end of the observed graph.


def predicted_seconds(able: Mapping[Stage, Sequence[ProcessingUnit]], predictions: Predictions) -> dict[Stage, float]:
    """Seconds of what is left of each stage, on the unit that a quick simulation gives it.

    As the paper says, without regard to dependencies: the shortest first, each to the unit that ends it soonest. A
    stage without a profile counts as taking no time.
    """
    taken: dict[str, float] = {}
    left: list[tuple[float, Stage, dict[str, float]]] = []
    found: dict[Stage, float] = {}
    for stage, units in able.items():
        items = max(stage.remaining, 1)
        known = {unit.name: predictions.seconds(stage.operation, items, unit.kind) for unit in units}
        options = {name: seconds for name, seconds in known.items() if seconds is not None}
        if options:
            left.append((min(options.values()), stage, options))
        else:
            found[stage] = 0.0
    for _, stage, options in sorted(left, key=lambda each: (each[0], each[1].progress.number)):
        unit = min(options, key=lambda name: taken.get(name, 0.0) + options[name])
        taken[unit] = taken.get(unit, 0.0) + options[unit]
        found[stage] = options[unit]
    return found


def criticality(seconds: Mapping[Stage, float]) -> dict[Stage, float]:
    """Criticality of each unfinished stage, in seconds. seconds: of each of them."""
    paths: dict[Stage, float] = {}

    def look(stage: Stage) -> float:
        if stage.progress.finished:
            return 0.0
        if stage not in paths:
            paths[stage] = seconds[stage] + max(map(look, stage.progress.followers), default=0.0)
        return paths[stage]

    return {stage: look(stage) for stage in seconds}


def continued(
    graph: StageGraph, stage: Stage, units: Sequence[ProcessingUnit], predictions: Predictions
) -> dict[str, float]:
    """By memory of these units, seconds that what continues a stage's text takes there, beyond those where it is
    fastest: a text is written where it is read. Empty where there is no choice."""
    memories = {unit.memory for unit in units}
    if len(memories) < 2:
        return {}
    seconds = dict.fromkeys(memories, 0.0)
    for follower in (each for each in graph.of_text(stage) if each is not stage):
        for memory in memories:
            kinds = {unit.kind for unit in units if unit.memory == memory}
            known = [predictions.seconds(follower.operation, follower.remaining, kind) for kind in kinds]
            seconds[memory] += min((found for found in known if found is not None), default=0.0)
    best = min(seconds.values())
    return {memory: taken - best for memory, taken in seconds.items()}


# The unit and the shape of the next launch of a stage.


FIRST_SHAPE: Final = 8  # items of the first launch of an operation that has no profile


@dataclass(slots=True)
class Running:
    """A launch under way."""

    launch: Launch
    memory: str
    began: float  # s
    moving_s: float  # of moving its data: no part of what it takes there
    end: float  # as predicted


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch that was chosen."""

    unit: ProcessingUnit
    shape: int
    count: int
    moving_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class _Option:
    """A unit with a shape. idle: it can begin now."""

    unit: ProcessingUnit
    profile: OperationProfile
    shape: int
    idle: bool
    end: float  # s, predicted, of all that is left
    score: float


@dataclass(slots=True)
class Placer:
    """Places launches at one moment. `free` is when units are expected to be free; it grows with what was placed."""

    now: float
    predictions: Predictions
    running: Collection[Running]
    free: dict[str, float]
    idle: set[str]

    def place(self, stage: Stage, units: Sequence[ProcessingUnit], after: Mapping[str, float]) -> LaunchPlan | None:
        """The next launch of a stage that can begin; None: it shall wait. A unit that it waits for is taken for less
        critical ones.

        units: that may run it. after: by memory, see `continued`.
        """
        if (first := self._first(stage, units)) is not None:
            return first
        options = [option for unit in units if (option := self._option(stage, unit, after)) is not None]
        if not options:
            return None
        ordered = stage.operation.ordered
        best = min(options, key=lambda option: (option.score, not option.idle))
        if best.idle:
            placement = self._begin(stage, best, min(best.shape, stage.remaining))
            one = placement.moving_s + placement.compute_s
            self.free[best.unit.name] = best.end if ordered else self.now + one
            return placement
        if not ordered:
            helping = [option for option in options if option.idle]
            for option in sorted(helping, key=lambda each: (each.score, each.shape)):
                if count := self._help(stage, option, best):
                    return self._begin(stage, option, count)
        self.free[best.unit.name] = best.end
        return None

    def _option(self, stage: Stage, unit: ProcessingUnit, after: Mapping[str, float]) -> _Option | None:
        idle = unit.name in self.idle
        profile = self.predictions.profiles.get(stage.operation.name, unit.kind)
        if profile is None:
            return None
        shape = self.predictions.shape(stage.operation, stage.remaining, profile, unit.latency_s)
        begins = self.now if idle else self.free[unit.name]
        end = begins + self._moving(stage, unit, shape) + seconds_for(profile, stage.remaining, shape)
        return _Option(unit, profile, shape, idle, end, end + after.get(unit.memory, 0.0))

    def _help(self, stage: Stage, option: _Option, best: _Option) -> int:
        """Items with which an idle unit ends no later than the busy one would with the rest; 0: none."""
        count = min(option.shape, stage.remaining)
        moved = option.unit.transfer_s(count * stage.operation.item_bytes)
        share = (stage.remaining - count) / stage.remaining
        rest = self.free[best.unit.name] + share * (best.end - self.free[best.unit.name])
        return count if self.now + moved + option.profile.seconds(count) <= rest else 0

    def _moving(self, stage: Stage, unit: ProcessingUnit, shape: int) -> float:
        if stage.operation.open_ended:  # it comes by itself as it is written, and was asked for with its prompt
            return 0.0
        launches = math.ceil(stage.remaining / shape)
        return unit.transfer_s(stage.remaining * stage.operation.item_bytes) + (launches - 1) * unit.latency_s

    def _begin(self, stage: Stage, option: _Option, count: int) -> LaunchPlan:
        self.idle.discard(option.unit.name)
        moving = 0.0 if stage.operation.open_ended else option.unit.transfer_s(count * stage.operation.item_bytes)
        return LaunchPlan(option.unit, option.shape, count, moving, option.profile.seconds(count))

    def _first(self, stage: Stage, units: Sequence[ProcessingUnit]) -> LaunchPlan | None:
        """A first launch on a kind of unit that has no profile: its time is learnt. Where others have one, only while
        nothing else runs there."""
        operation = stage.operation
        known = {unit.kind for unit in units if self.predictions.profiles.get(operation.name, unit.kind)}
        for unit in units:
            waits = bool(known) and any(running.memory == unit.memory for running in self.running)
            if unit.kind not in known and unit.name in self.idle and not waits:
                self.idle.discard(unit.name)
                count = min(stage.remaining, operation.group or FIRST_SHAPE)
                return LaunchPlan(unit, count, count, 0.0, 0.0)
        return None
