"""One setting (phone, models, workflow, data set): seconds of each question, by way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.simulation.workflows import WorkflowSimulation
from paceline.workflow.builder import WorkflowName, WorkflowTemplate, templates
from paceline.workflow.placement import SchedulingPolicy
from paceline.workflow.profiling import ProfileStore
from paceline.workflow.scheduler import WorkflowScheduler

from .lengths import DataSet, lengths_of
from .phones import FAMILIES, OPERATIONS, PHONES, Efficiency, fitted_profiles, true_profiles, units
from .queries import Query, QueryScript
from .ways import Way

Learnt = dict[str, WorkflowTemplate]


@dataclass(frozen=True, slots=True)
class Bed:
    """A phone with a family of models: what is true, and what the scheduler was told."""

    phone: str
    family: str
    efficiency: str
    true: ProfileStore
    known: ProfileStore

    @staticmethod
    def of(phone: str, family: str, efficiency: Efficiency, contention: float) -> Bed:
        true = true_profiles(PHONES[phone], FAMILIES[family], efficiency, contention)
        return Bed(phone, family, efficiency.name, true, fitted_profiles(true, PHONES[phone], OPERATIONS, seed=1))


@dataclass(frozen=True, slots=True)
class Cell:
    bed: Bed
    workflow: WorkflowName
    data_set: DataSet

    @property
    def row(self) -> dict[str, object]:
        return {
            "efficiency": self.bed.efficiency,
            "phone": self.bed.phone,
            "models": self.bed.family,
            "workflow": self.workflow,
            "data": self.data_set.name,
        }


def questions(data_set: DataSet, data: Path | None, count: int) -> list[Query]:
    return [
        Query.draw(number, lengths, several_hops=data_set.several_hops)
        for number, lengths in enumerate(lengths_of(data_set, data, count))
    ]


def seconds(cell: Cell, way: Way, queries: Sequence[Query], *, longer: int = 0) -> list[float]:
    """One after another; templates learn from those before. longer: tokens more of each answer."""
    learnt = templates()
    return [_play(cell, way.policy, query, learnt, longer) for query in queries]


def _play(cell: Cell, policy: SchedulingPolicy, query: Query, learnt: Learnt, longer: int) -> float:
    pool = units()
    script = QueryScript.of(query, cell.workflow, whole=not policy.partition, longer=longer)
    scheduler = WorkflowScheduler(pool, cell.bed.known, learnt, policy)
    simulation = WorkflowSimulation(scheduler, pool, cell.bed.true, script, script.jitter)
    return simulation.run(script.builder.begin())
