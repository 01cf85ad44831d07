"""The plan of a measurement: seconds of each operation by shape, then slowdowns, all within a given time.

A slowdown is measured in pairs: a launch beside a load, then the same alone, so that what else the machine does by and
by is in both. Medians everywhere. Time is shared out evenly over what is left to do; a series that is out of time
keeps what it has, and one that has less than three launches is left out, which a note says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from paceline.runtime.profiling.loads import Load, OtherLaunches
from paceline.runtime.profiling.operations import Clock, Operation
from paceline.runtime.units.registry import ENGINE, LANES
from paceline.workflow.profiling.contention import ENOUGH, KEPT, LOWEST, ContentionSamples
from paceline.workflow.profiling.learning import Demand, LearningProfiles
from paceline.workflow.profiling.profiles import OperationProfile, ShapePoint

ALONE_SHARE: Final = 0.35  # of the time, for seconds by shape
MOST: Final = 15  # launches of a shape alone
FIT: Final = 8  # launches that a shape is to have room for in a series beside a load

Progress = Callable[[str, float], None]  # what is measured, and the share of the time that is over


@dataclass(slots=True)
class _Found:
    """What has been measured of an operation."""

    seconds: dict[int, list[float]] = field(default_factory=dict)  # by shape, alone
    samples: ContentionSamples = field(default_factory=ContentionSamples)


@dataclass(slots=True)
class Measurement:
    """budget: seconds in all; one launch may go beyond it. clock: seconds; it goes on while launches run."""

    operations: Sequence[Operation]
    demand: Demand
    budget: float
    clock: Clock
    progress: Progress = lambda _, __: None
    notes: list[str] = field(default_factory=list)
    _found: dict[str, _Found] = field(default_factory=dict)  # by the operation's first name
    _began: float = 0.0

    async def run(self, loads: Sequence[Load]) -> LearningProfiles:
        """Measure all. loads: beside every operation, besides the launches of other operations."""
        self._began = self.clock()
        await self._alone()
        measured = [operation for operation in self.operations if self._found[operation.names[0]].seconds]
        measured.sort(
            key=lambda each: min(map(median, self._found[each.names[0]].seconds.values()))
        )  # the slowest last
        series = [(each, load) for each in measured for load in [*loads, *self._others(each, measured)]]
        for place, (operation, load) in enumerate(series):
            self.progress(f"{operation.names[-1]} beside {load.name}", self._over)
            await self._beside(operation, load, self._left / (len(series) - place))
        self.progress("done", 1.0)
        return self._profiles()

    @property
    def _left(self) -> float:
        return max(0.0, self._began + self.budget - self.clock())

    @property
    def _over(self) -> float:
        return 1.0 - self._left / self.budget

    async def _alone(self) -> None:
        shapes = [(operation, shape) for operation in self.operations for shape in operation.shapes]
        end = self._began + ALONE_SHARE * self.budget
        slow: set[str] = set()  # operations whose larger shapes would take too long
        for place, (operation, shape) in enumerate(shapes):
            name = operation.names[0]
            found = self._found.setdefault(name, _Found())
            if name in slow:
                continue
            self.progress(f"{operation.names[-1]} of {shape}", self._over)
            slot = max(0.0, end - self.clock()) / (len(shapes) - place)
            began = self.clock()
            first = await operation.launch(shape)  # a warm-up
            seconds: list[float] = []
            while len(seconds) < MOST and (len(seconds) < ENOUGH or self.clock() - began < slot):
                if self.clock() + first > self._began + self.budget:
                    break
                seconds.append(await operation.launch(shape))
            if seconds:
                found.seconds[shape] = seconds
            larger = [each for each in operation.shapes if each > shape]
            if larger and (not seconds or first * larger[0] / shape * (1 + ENOUGH) > self._left / 2):
                slow.add(name)
                self.notes.append(f"{operation.names[-1]} of {larger[0]} and more takes too long to be measured.")

    def _others(self, operation: Operation, measured: Sequence[Operation]) -> list[Load]:
        """Launches of other kinds of units, and of the engine's other lanes."""
        found: list[Load] = []
        for other in measured:
            if other.kind == operation.kind and (other.kind != ENGINE or other.names[0] != operation.names[0]):
                continue
            seconds = self._found[other.names[0]].seconds
            shape = sorted(seconds)[len(seconds) // 2]
            each = self._bandwidth(other, shape, median(seconds[shape]))
            for lanes in (1, LANES - 1) if other is operation else (1,):
                found.append(OtherLaunches(other, shape, lanes * each, lanes))
        return found

    async def _beside(self, operation: Operation, load: Load, slot: float) -> None:
        found = self._found[operation.names[0]]
        known = {shape: median(seconds) for shape, seconds in found.seconds.items()}
        shape = max((n for n, seconds in known.items() if 2 * FIT * seconds <= slot), default=min(known))
        began = self.clock()
        pairs: list[tuple[float, float]] = []
        while len(pairs) < KEPT and (len(pairs) < ENOUGH or self.clock() - began < slot):
            if self.clock() + 2 * known[shape] > self._began + self.budget:
                break
            await load.begin()
            try:
                beside = await operation.launch(shape)
            finally:
                await load.end()
            pairs.append((beside, await operation.launch(shape)))
        if len(pairs) < ENOUGH:
            self.notes.append(f"There was no time for {operation.names[-1]} beside {load.name}.")
            return
        base = median(alone for _, alone in pairs)
        own = self._bandwidth(operation, shape, base)
        found.seconds[shape] += [alone for _, alone in pairs]
        for beside, alone in pairs:
            found.samples.add(max(own, LOWEST) + load.bandwidth, beside / base)
            found.samples.add(max(own, LOWEST), alone / base)

    def _bandwidth(self, operation: Operation, shape: int, seconds: float) -> float:
        """GB/s"""
        return self.demand(operation.names[0], operation.kind, shape) / 1e9 / seconds

    def _profiles(self) -> LearningProfiles:
        profiles, samples = {}, {}
        for operation in self.operations:
            found = self._found[operation.names[0]]
            if not found.seconds:
                self.notes.append(f"There was no time for {operation.names[-1]}.")
                continue
            points = [
                ShapePoint(shape, seconds, self._bandwidth(operation, shape, seconds))
                for shape, taken in found.seconds.items()
                for seconds in [max(median(taken), 1e-9)]
            ]
            for name in operation.names:
                profiles[name, operation.kind] = OperationProfile(points, found.samples.fit())
                samples[name, operation.kind] = ContentionSamples(found.samples)
        return LearningProfiles(profiles, samples, self.demand)
