"""Which sub-stage the end of the workflow waits for (HeRo, eq. 4).

Criticality is the longest path of predicted seconds from a sub-stage to the end of the observed graph, plus beta times
what the template expects beyond decisions that have not been made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from paceline.workflow.graph import StageGraph, SubStage, SubStageId
from paceline.workflow.partition import best_shape, seconds_for, shapes_to_try
from paceline.workflow.profiling.profiles import OperationProfile, ProfileStore
from paceline.workflow.templates import WorkflowTemplate
from paceline.workflow.units import ProcessingUnit

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
