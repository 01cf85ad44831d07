"""Graphs, units and profiles of tests: seeded, small, and a script for graphs that are known from the beginning."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.scheduling import AblatedScheduler, Ablation, GivenProfiles
from lab.simulation.workflows import Slowdown, Truth, WorkflowSimulation
from paceline.workflow.graph import Need, Operation, Outcome, ProcessingUnit, Request, Stage
from paceline.workflow.profiles import Key, OperationProfile, Profiles

RISING = Slowdown((46.0, 77.0, 110.0), (1.0, 1.3, 2.0))
REQUEST = Request()


@dataclass
class Known:
    """Nothing happens but what is known; open-ended stages end after `lengths`."""

    lengths: dict[Stage, int] = field(default_factory=dict)
    adding: dict[tuple[Stage, int], Sequence[Stage]] = field(default_factory=dict)  # (stage, done) -> added

    def items(self, stage: Stage, first: int, count: int) -> int:
        return min(count, self.lengths.get(stage, stage.items) - first) if stage.operation.open_ended else count

    def after(self, stage: Stage, done: int) -> Outcome:
        ended = stage.operation.open_ended and done >= self.lengths.get(stage, stage.items)
        return Outcome(added=self.adding.get((stage, done), ()), finished=ended)


def unit(name: str, models: Sequence[str] = ("m",), **changed: object) -> ProcessingUnit:
    return ProcessingUnit(name, name, frozenset(models), **changed)  # type: ignore[arg-type]  # by name


def task(
    *after: Stage,
    model: str = "m",
    items: int = 1,
    request: Request = REQUEST,
    operation: Mapping[str, object] | None = None,
    **changed: object,
) -> Stage:
    """operation: what it has besides."""
    kind = Operation(model, "run", **(operation or {}))  # type: ignore[arg-type]  # by name
    return Stage(model, kind, items, [Need(each) for each in after], request=request, **changed)  # type: ignore[arg-type]


def ordered(*after: Stage, model: str = "m") -> Stage:
    return task(*after, model=model, operation={"ordered": True})


def single_launch_graph(seed: int, size: int, units: int) -> tuple[list[Stage], list[ProcessingUnit], GivenProfiles]:
    """A graph whose stages have a model each, one item, and seconds of their own on each unit."""
    rng = random.Random(seed)
    stages: list[Stage] = []
    for i in range(1, size + 1):
        stages.append(ordered(*(stage for stage in stages if rng.random() < 0.35), model=f"m{i}"))
    pool = [unit(f"u{k}", [stage.operation.model for stage in stages]) for k in range(units)]
    return (
        stages,
        pool,
        GivenProfiles(
            {
                (stage.operation.name, each.kind): OperationProfile({1: round(rng.uniform(1.0, 10.0), 3)})
                for stage in stages
                for each in pool
            }
        ),
    )


def seconds_of(profiles: Profiles, stage: Stage, on: ProcessingUnit) -> float:
    """Of one item."""
    profile = profiles.get(stage.operation.name, on.kind)
    assert profile is not None
    return profile.seconds(1)


def simulate(
    stages: Sequence[Stage],
    units: Sequence[ProcessingUnit],
    truth: GivenProfiles | Mapping[Key, Truth],
    ablation: Ablation | None = None,
    script: Known | None = None,
) -> WorkflowSimulation:
    """Run to the end; the scheduler knows what is true but for contention."""
    if isinstance(truth, GivenProfiles):
        truth = {key: Truth(profile) for key, profile in truth.given.items()}
    known = GivenProfiles({key: each.profile for key, each in truth.items()})
    scheduler = AblatedScheduler(units, known, ablation or Ablation())
    simulation = WorkflowSimulation(scheduler, units, truth, script or Known())
    simulation.run(stages)
    return simulation
