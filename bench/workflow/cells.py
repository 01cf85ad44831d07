"""One setting (phone, models, workflow, data set): seconds of each question, by way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.scheduling import AblatedScheduler, Ablation
from lab.simulation.workflows import Truth, WorkflowSimulation
from paceline.workflow.flows import WorkflowName
from paceline.workflow.profiles import Key, Profiles

from .lengths import DataSet, lengths_of
from .phones import FAMILIES, PHONES, Efficiency, fitted_profiles, true_profiles, units
from .queries import Query, QueryScript
from .ways import Way


@dataclass(frozen=True, slots=True)
class Bed:
    """A phone with a family of models: what is true, and what the scheduler was told."""

    phone: str
    family: str
    efficiency: str
    true: Mapping[Key, Truth]
    known: Profiles

    @staticmethod
    def of(phone: str, family: str, efficiency: Efficiency, contention: float) -> Bed:
        true = true_profiles(PHONES[phone], FAMILIES[family], efficiency, contention)
        return Bed(phone, family, efficiency.name, true, fitted_profiles(true, seed=1))


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
    """One after another. longer: tokens more of each answer."""
    return [_play(cell, way.policy, query, longer) for query in queries]


def _play(cell: Cell, policy: Ablation, query: Query, longer: int) -> float:
    pool = units()
    script = QueryScript.of(query, cell.workflow, whole=not policy.partition, longer=longer)
    scheduler = AblatedScheduler(pool, cell.bed.known, policy)
    return WorkflowSimulation(scheduler, pool, cell.bed.true, script, script.jitter).run(script.first)
