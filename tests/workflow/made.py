"""Graphs, units and profiles of tests: seeded, small, and a script for graphs that are known from the beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.simulation.workflows import Outcome, WorkflowSimulation
from paceline.workflow.activity import Slowdown
from paceline.workflow.graph import Dependency, ProcessingUnit, SubStage, SubStageId
from paceline.workflow.placement import SchedulingPolicy
from paceline.workflow.profiling import OperationProfile, ProfileStore, ShapePoint
from paceline.workflow.scheduler import WorkflowScheduler

RISING = Slowdown((46.0, 77.0, 110.0), (1.0, 1.3, 2.0))
PLAIN = SchedulingPolicy(control=False, future_weight=0.0)


@dataclass
class Known:
    """Nothing happens but what is known; open-ended sub-stages end after `lengths`."""

    lengths: dict[SubStageId, int] = field(default_factory=dict)
    adding: dict[tuple[SubStageId, int], Sequence[SubStage]] = field(default_factory=dict)  # (sub-stage, done) -> added

    def items(self, node: SubStage, first: int, count: int) -> int:
        return min(count, self.lengths.get(node.id, node.items) - first) if node.open_ended else count

    def after(self, node: SubStage, done: int) -> Outcome:
        ended = node.open_ended and done >= self.lengths.get(node.id, node.items)
        return Outcome(added=self.adding.get((node.id, done), ()), finished=ended)


def unit(name: str, models: Sequence[str] = ("m",), **changed: object) -> ProcessingUnit:
    return ProcessingUnit(name, name, frozenset(models), **changed)  # type: ignore[arg-type]  # by name


def task(number: int, *after: int, model: str = "m", items: int = 1, **changed: object) -> SubStage:
    needs = tuple(Dependency(SubStageId(each)) for each in after)
    return SubStage(SubStageId(number), f"s{number}", model, "run", items, needs, **changed)  # type: ignore[arg-type]


def single_launch_graph(seed: int, size: int, units: int) -> tuple[list[SubStage], list[ProcessingUnit], ProfileStore]:
    """A graph whose sub-stages have a model each, one item, and seconds of their own on each unit."""
    rng = random.Random(seed)
    nodes = [
        task(i, *(j for j in range(1, i) if rng.random() < 0.35), model=f"m{i}", ordered=True)
        for i in range(1, size + 1)
    ]
    pool = [unit(f"u{k}", [node.model for node in nodes]) for k in range(units)]
    profiles = {
        (node.operation, each.kind): OperationProfile([ShapePoint(1, round(rng.uniform(1.0, 10.0), 3), 0.0)])
        for node in nodes
        for each in pool
    }
    return nodes, pool, ProfileStore(profiles)


def simulate(
    nodes: Sequence[SubStage],
    units: Sequence[ProcessingUnit],
    profiles: ProfileStore,
    policy: SchedulingPolicy | None = None,
    script: Known | None = None,
) -> WorkflowSimulation:
    """Run to the end; the true profiles are the scheduler's."""
    simulation = WorkflowSimulation(
        WorkflowScheduler(units, profiles, policy=policy), units, profiles, script or Known()
    )
    simulation.run(nodes)
    return simulation
