"""The unit and the shape of a sub-stage's next launch (HeRo, algorithm 1, lines 9 to 16, corrected as in specs 3.1).

A configuration's score is the predicted end of all that is left of the sub-stage there, plus alpha times the delay that
its bandwidth causes the most critical launch, both in seconds. A busy unit counts with the time when it is expected to
be free: where it wins, the sub-stage waits for it, and idle units only help, with launches that end before it would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.workflow.activity import Activity, Running, Slowdown
from paceline.workflow.builder import WorkflowTemplate
from paceline.workflow.graph import ProcessingUnit, StageGraph, SubStage, SubStageId
from paceline.workflow.profiling import OperationProfile, ProfileStore

# The shapes in which the work of a sub-stage is cut for a unit (HeRo, eq. 3).


def best_shape(profile: OperationProfile, items: int, most: int | None = None, launch_s: float = 0.0) -> int:
    """Shape with the least ceil(items ÷ shape) · seconds(shape); of equal ones the smallest.

    most: items of a launch. launch_s: s, what each launch takes besides, as to a unit elsewhere.
    """
    shapes = [shape for shape in profile.shapes if most is None or shape <= most] or [profile.shapes[0]]
    return min(shapes, key=lambda shape: math.ceil(items / shape) * (profile.seconds(shape) + launch_s))


def shapes_to_try(
    profile: OperationProfile, items: int, most: int | None = None, launch_s: float = 0.0
) -> tuple[int, ...]:
    """The best shape and its neighbours, which may ask for less bandwidth or be done sooner."""
    shapes = [shape for shape in profile.shapes if most is None or shape <= most] or [profile.shapes[0]]
    at = shapes.index(best_shape(profile, items, most, launch_s))
    return tuple(shapes[max(at - 1, 0) : at + 2])


def seconds_for(profile: OperationProfile, items: int, shape: int) -> float:
    """Seconds for so many items in launches of that shape, alone on the memory; the last may have fewer items."""
    whole, rest = divmod(items, shape)
    return whole * profile.seconds(shape) + (profile.seconds(rest) if rest else 0.0)


# Which sub-stage the end of the workflow waits for (HeRo, eq. 4).
#
# Criticality is the longest path of predicted seconds from a sub-stage to the end of the observed graph, plus beta
# times what the template expects beyond decisions that have not been made.


MAX_KNOWN: Final = 50_000  # predictions that are remembered


class Predictions:
    """Shapes of work on a unit, and its seconds alone there in the best one; remembered until a profile changes."""

    def __init__(self, profiles: ProfileStore, fixed_shape: int | None) -> None:
        """fixed_shape: of each launch that can be cut; None: the best."""
        self._profiles = profiles
        self._fixed = fixed_shape
        self._known: dict[tuple[str, str, int, int | None, bool], float | None] = {}
        self._shapes: dict[tuple[str, str, int, int | None, float], tuple[int, ...]] = {}
        self._revision = profiles.revision

    def shapes(self, node: SubStage, items: int, unit: ProcessingUnit, profile: OperationProfile) -> tuple[int, ...]:
        """Shapes to try for so many items of a sub-stage."""
        self._forget()
        if self._fixed is not None:
            return (items if node.ordered else min(self._fixed, items),)
        key = node.operation, unit.kind, items, node.group, unit.latency_s
        if key not in self._shapes:
            self._shapes[key] = shapes_to_try(profile, items, node.group, unit.latency_s)
        return self._shapes[key]

    def seconds(self, node: SubStage, items: int, kind: str) -> float | None:
        """Of so many items of a sub-stage; None without a profile."""
        return self.operation(node.operation, items, kind, most=node.group, ordered=node.ordered)

    def operation(
        self, operation: str, items: int, kind: str, *, most: int | None = None, ordered: bool = False
    ) -> float | None:
        self._forget()
        key = operation, kind, items, most, ordered
        if key not in self._known:
            profile = self._profiles.get(operation, kind)
            if profile is None or items <= 0:
                self._known[key] = None if profile is None else 0.0
            elif self._fixed is None:
                self._known[key] = seconds_for(profile, items, best_shape(profile, items, most))
            else:
                self._known[key] = seconds_for(profile, items, items if ordered else self._fixed)
        return self._known[key]

    def _forget(self) -> None:
        """What was remembered is of older profiles, or too much."""
        if self._revision != self._profiles.revision or len(self._known) + len(self._shapes) > MAX_KNOWN:
            self._known.clear()
            self._shapes.clear()
            self._revision = self._profiles.revision


def predicted_seconds(
    graph: StageGraph, able: Mapping[SubStageId, Sequence[ProcessingUnit]], predictions: Predictions
) -> dict[SubStageId, float]:
    """Seconds of what is left of each unfinished sub-stage, on the unit that a quick simulation gives it.

    As the paper says, without regard to dependencies: the shortest first, each to the unit that ends it soonest. A
    sub-stage without a profile counts as taking no time.
    """
    taken: dict[str, float] = {}
    left: list[tuple[float, SubStage, dict[str, float]]] = []
    found: dict[SubStageId, float] = {}
    for node in graph.unfinished():
        items = max(graph.remaining(node.id), 1)
        known = {unit.name: predictions.seconds(node, items, unit.kind) for unit in able[node.id]}
        options = {name: seconds for name, seconds in known.items() if seconds is not None}
        if options:
            left.append((min(options.values()), node, options))
        else:
            found[node.id] = 0.0
    for _, node, options in sorted(left, key=lambda each: (each[0], each[1].id)):
        unit = min(options, key=lambda name: taken.get(name, 0.0) + options[name])
        taken[unit] = taken.get(unit, 0.0) + options[unit]
        found[node.id] = options[unit]
    return found


def continued(
    graph: StageGraph, node: SubStage, units: Sequence[ProcessingUnit], predictions: Predictions
) -> dict[str, float]:
    """By memory of these units, seconds that what continues a sub-stage's text takes there, beyond those where it is
    fastest: a text is written where it is read. Empty where there is no choice."""
    memories = {unit.memory for unit in units}
    if len(memories) < 2:
        return {}
    seconds = dict.fromkeys(memories, 0.0)
    for follower in (graph[each] for each in graph.of_context(node.id) if each != node.id):
        for memory in memories:
            kinds = {unit.kind for unit in units if unit.memory == memory}
            known = [predictions.seconds(follower, graph.remaining(follower.id), kind) for kind in kinds]
            seconds[memory] += min((found for found in known if found is not None), default=0.0)
    best = min(seconds.values())
    return {memory: taken - best for memory, taken in seconds.items()}


def criticality(
    graph: StageGraph,
    seconds: Mapping[SubStageId, float],
    future: Callable[[SubStage], float],
    beta: float,
) -> dict[SubStageId, float]:
    """Criticality of each unfinished sub-stage, in seconds. future: of a sub-stage that decides."""
    paths: dict[SubStageId, tuple[float, float]] = {}  # longest path, expected beyond it

    def look(node: SubStageId) -> tuple[float, float]:
        if graph.is_finished(node):
            return 0.0, 0.0
        if node not in paths:
            after = [look(each) for each in graph.followers(node)]
            beyond = max((later for _, later in after), default=0.0)
            if graph[node].decides and beta:
                beyond = max(beyond, future(graph[node]))
            paths[node] = seconds[node] + max((longest for longest, _ in after), default=0.0), beyond
        return paths[node]

    return {node.id: longest + beta * beyond for node in graph.unfinished() for longest, beyond in [look(node.id)]}


def future_of(
    templates: Mapping[str, WorkflowTemplate], kinds: tuple[str, ...], predictions: Predictions
) -> Callable[[SubStage], float]:
    """Expected seconds beyond a deciding sub-stage, each operation on the kind of unit where it is fastest."""

    def fastest(operation: str, items: int) -> float:
        known = [predictions.operation(operation, items, kind) for kind in kinds]
        return min((seconds for seconds in known if seconds is not None), default=0.0)

    def future(node: SubStage) -> float:
        template = templates.get(node.workflow)
        return 0.0 if template is None else template.future(node.stage, fastest)

    return future


# Options of the scheduler. HeRo is the default; switched off one by one they are its ablations and baselines.


# Found by grid search over the simulator's workflows (`bench/workflow`), as the paper tunes them for each deployment.
CONTENTION_WEIGHT = 0.3
FUTURE_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """What decides order, place and shape of launches."""

    partition: bool = True  # shapes by eq. 3; else `fixed_shape`, and every stage waits for whole ones
    fixed_shape: int = 8  # most items of a launch without partition; ordered sub-stages are one launch then
    criticality: bool = True  # the most critical sub-stage first; else in the order of their appearance
    # Stage or model -> name of the one unit it runs on, or first word of its units' names; None: wherever it is best
    static_map: Mapping[str, str] | None = None
    look_ahead: bool = True  # a sub-stage may wait for a busy unit that would end it sooner
    control: bool = True  # contention penalty and bandwidth limit
    contention_weight: float = CONTENTION_WEIGHT  # alpha, s a s of delay of the most critical launch
    future_weight: float = FUTURE_WEIGHT  # beta
    soft_limit: float = float("inf")  # GB/s on one memory (B_soft)


DEFAULT_SHAPE = 8  # items of the first launch of an operation that has no profile


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of a sub-stage, and the units that may run it."""

    node: SubStage
    remaining: int  # items
    available: int  # of them, those that may begin now
    units: Sequence[ProcessingUnit]
    after: Mapping[str, float] = field(default_factory=dict)  # by memory: s that what continues it there takes longer


@dataclass(frozen=True, slots=True)
class CriticalLaunch:
    """The most critical launch under way, with what its sub-stage will do after it."""

    running: Running
    compute_s: float  # s left of the sub-stage, alone on the memory


@dataclass(frozen=True, slots=True)
class Placement:
    """A launch that was chosen."""

    unit: ProcessingUnit
    shape: int
    count: int
    transfer_s: float
    compute_s: float  # alone on the memory
    bandwidth: float  # GB/s
    slowdown: Slowdown
    forced: bool = False


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
    profiles: ProfileStore
    predictions: Predictions
    policy: SchedulingPolicy
    activity: Activity
    free: dict[str, float]
    idle: set[str] = field(default_factory=set)

    def reserve(self, unit: str, seconds: float) -> None:
        """A unit will go on with what it is doing for so long."""
        self.free[unit] += seconds

    def place(self, work: Work, critical: CriticalLaunch | None) -> Placement | None:
        """None: it shall wait. A unit that it waits for is taken for less critical ones."""
        if (trial := self._trial(work)) is not None:
            return trial
        options = [option for unit in work.units for option in self._options(work, unit, critical)]
        if not options:
            return self._unknown(work)
        best = min(options, key=lambda option: (option.score, not option.idle))
        if best.idle:
            if critical is not None and self._better_later(work, best.score, critical):
                return None
            count = min(best.shape, work.available)
            if count < min(best.shape, work.remaining) and not work.node.ordered and self.activity:
                return None  # what flows in will fill the launch
            placement = self._begin(work, best, count)
            one = placement.transfer_s + placement.compute_s * self._rate(best)
            self.free[best.unit.name] = best.end if work.node.ordered else self.now + one
            return placement
        if not work.node.ordered:
            helping = [option for option in options if option.idle]
            for option in sorted(helping, key=lambda each: (each.score, each.shape)):
                if count := self._help(work, option, best, critical):
                    return self._begin(work, option, count)
        self.free[best.unit.name] = best.end
        return None

    def force(self, work: Work) -> Placement | None:
        """The configuration that asks for the least bandwidth, whatever the limit; None where no unit is idle."""
        found = [
            (profile.bandwidth(shape), shape, unit.name, unit, profile)
            for unit in work.units
            if unit.name in self.idle and (profile := self.profiles.get(work.node.operation, unit.kind))
            for shape in self._shapes(work, unit, profile)
        ]
        if not found:
            return self._unknown(work)
        _, shape, _, unit, profile = min(found, key=lambda each: each[:3])
        option = _Option(unit, profile, shape, True, 0.0, 0.0)
        return self._begin(work, option, min(shape, work.available), forced=True)

    def _options(self, work: Work, unit: ProcessingUnit, critical: CriticalLaunch | None) -> list[_Option]:
        profile = self.profiles.get(work.node.operation, unit.kind)
        if profile is None:
            return []
        used, after = self.activity.used(unit.memory), work.after.get(unit.memory, 0.0)
        if unit.name not in self.idle:
            if not self.policy.look_ahead:
                return []
            own = [each for each in self.activity if each.launch.unit == unit.name]
            used = max(0.0, used - sum(each.bandwidth for each in own))
            shape = min(self._shapes(work, unit, profile), key=lambda each: seconds_for(profile, work.remaining, each))
            seconds = seconds_for(profile, work.remaining, shape) * profile.slowdown.at(used + profile.bandwidth(shape))
            end = self.free[unit.name] + self._moving(work, unit, shape) + seconds
            return [_Option(unit, profile, shape, False, end, end + after)]
        found = []
        for shape in self._shapes(work, unit, profile):
            bandwidth = profile.bandwidth(shape)
            if self.policy.control and used + bandwidth > self.policy.soft_limit:
                continue
            seconds = seconds_for(profile, work.remaining, shape) * profile.slowdown.at(used + bandwidth)
            end = self.now + self._moving(work, unit, shape) + seconds
            delay = self._delay(critical, unit, bandwidth, seconds)
            score = end + after + self.policy.contention_weight * delay
            found.append(_Option(unit, profile, shape, True, end, score))
        return found

    def _help(self, work: Work, option: _Option, best: _Option, critical: CriticalLaunch | None) -> int:
        """Items with which an idle unit ends no later than the busy one would with the rest; 0: none."""
        count = min(option.shape, work.available, work.remaining)
        bandwidth = option.profile.bandwidth(option.shape)
        seconds = option.profile.seconds(count) * self._rate(option)
        delay = self.policy.contention_weight * self._delay(critical, option.unit, bandwidth, seconds)
        moved = option.unit.transfer_s(count * work.node.item_bytes)
        share = (work.remaining - count) / work.remaining
        rest = self.free[best.unit.name] + share * (best.end - self.free[best.unit.name])
        return count if self.now + moved + seconds + delay <= rest else 0

    def _rate(self, option: _Option) -> float:
        """Slowdown of a launch that begins now."""
        used = self.activity.used(option.unit.memory) + option.profile.bandwidth(option.shape)
        return option.profile.slowdown.at(used)

    def _delay(self, critical: CriticalLaunch | None, unit: ProcessingUnit, bandwidth: float, seconds: float) -> float:
        """Seconds by which a launch that takes so long delays the critical one (W_B): marginal, and only while both
        run. 0 where control is off, or they are on different memories."""
        if critical is None or critical.running.memory != unit.memory:
            return 0.0
        used = self.activity.used(unit.memory)
        before, after = critical.running.slowdown.at(used), critical.running.slowdown.at(used + bandwidth)
        return (after - before) * min(critical.compute_s, seconds / after)

    def _better_later(self, work: Work, score: float, critical: CriticalLaunch) -> bool:
        """Whether beginning when the critical launch's sub-stage has ended is better than now, by the score."""
        running = critical.running
        used = self.activity.used(running.memory)
        ends = self.now + running.transfer_s + critical.compute_s * running.slowdown.at(used)
        for unit in work.units:
            profile = self.profiles.get(work.node.operation, unit.kind)
            if profile is None:
                continue
            begins = max(ends, self.free[unit.name]) + work.after.get(unit.memory, 0.0)
            shape = min(self._shapes(work, unit, profile), key=lambda each: seconds_for(profile, work.remaining, each))
            others = self.activity.used(unit.memory) - (running.bandwidth if running.memory == unit.memory else 0.0)
            rate = profile.slowdown.at(others + profile.bandwidth(shape))
            if begins + self._moving(work, unit, shape) + seconds_for(profile, work.remaining, shape) * rate < score:
                return True
        return False

    def _shapes(self, work: Work, unit: ProcessingUnit, profile: OperationProfile) -> Sequence[int]:
        return self.predictions.shapes(work.node, work.remaining, unit, profile)

    def _moving(self, work: Work, unit: ProcessingUnit, shape: int) -> float:
        if work.node.open_ended:  # a text comes by itself as it is written, and was asked for when its prompt was sent
            return 0.0
        launches = math.ceil(work.remaining / shape)
        return unit.transfer_s(work.remaining * work.node.item_bytes) + (launches - 1) * unit.latency_s

    def _begin(self, work: Work, option: _Option, count: int, *, forced: bool = False) -> Placement:
        profile = option.profile
        self.idle.discard(option.unit.name)
        return Placement(
            option.unit,
            option.shape,
            count,
            0.0 if work.node.open_ended else option.unit.transfer_s(count * work.node.item_bytes),
            profile.seconds(count),
            profile.bandwidth(option.shape),
            profile.slowdown,
            forced,
        )

    def _trial(self, work: Work) -> Placement | None:
        """A first launch on a kind of unit that has no profile while others have: one at a time, its time is learnt."""
        known = {unit.kind for unit in work.units if self.profiles.get(work.node.operation, unit.kind)}
        if not known:
            return None
        for unit in work.units:
            alone = not any(running.memory == unit.memory for running in self.activity)
            if unit.kind not in known and unit.name in self.idle and alone:
                self.idle.discard(unit.name)
                count = min(work.available, work.node.group or DEFAULT_SHAPE)
                return Placement(unit, count, count, 0.0, 0.0, 0.0, Slowdown())
        return None

    def _unknown(self, work: Work) -> Placement | None:
        """A first launch of an operation that has no profile anywhere, on the first idle unit: its time is learnt."""
        if any(self.profiles.get(work.node.operation, unit.kind) for unit in work.units):
            return None
        for unit in work.units:
            if unit.name in self.idle:
                self.idle.discard(unit.name)
                count = min(work.available, work.node.group or DEFAULT_SHAPE)
                return Placement(unit, count, count, 0.0, 0.0, 0.0, Slowdown())
        return None
