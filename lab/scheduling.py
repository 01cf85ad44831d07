"""Other ways for the scheduler of workflows: ablations of HeRo, static maps, which are its baselines, and profiles that
are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.workflow.graph import Operation, ProcessingUnit, Stage
from paceline.workflow.placement import Placer, Predictions
from paceline.workflow.profiles import Key, OperationProfile, Profiles
from paceline.workflow.scheduler import WorkflowScheduler

FIXED_SHAPE = 8  # most items of a launch without partition


class PaddedProfile(OperationProfile):
    """Profile of a unit that runs compiled shapes only: a launch with fewer items takes as long as a full one."""

    def seconds(self, items: int) -> float:
        whole, rest = divmod(items, self.shapes[-1])
        if whole:
            return whole * super().seconds(self.shapes[-1]) + (self.seconds(rest) if rest else 0.0)
        return super().seconds(next(shape for shape in self.shapes if shape >= items))


class GivenProfiles(Profiles):
    """Those that are given are neither learnt nor forgotten."""

    def __init__(self, given: Mapping[Key, OperationProfile]) -> None:
        super().__init__()
        self.given = dict(given)

    def get(self, operation: str, kind: str) -> OperationProfile | None:
        return self.given.get((operation, kind)) or super().get(operation, kind)

    def learn(self, operation: str, kind: str, shape: int, seconds: float) -> None:
        if (operation, kind) not in self.given:
            super().learn(operation, kind, shape, seconds)


@dataclass(frozen=True)
class Ablation:
    """Parts of the scheduler that are left out."""

    partition: bool = True  # shapes by eq. 3; else fixed ones, and texts as a whole
    criticality: bool = True  # the most critical stage first; else in the order of their appearance
    look_ahead: bool = True  # a stage may wait for a busy unit that would end it sooner
    # Name of a stage, or model -> name of the one unit it runs on, or first word of its units' names; None: any
    static_map: Mapping[str, str] | None = None


def static_map(units: Mapping[str, str]) -> Ablation:
    """A fixed map knows no shapes: up to 8 chunks a launch, texts as a whole."""
    return Ablation(partition=False, criticality=False, look_ahead=False, static_map=units)


class _FixedShapes(Predictions):
    def shape(self, operation: Operation, items: int, *_: object) -> int:
        return items if operation.ordered else min(FIXED_SHAPE, items)


class _IdleOnly(Placer):
    def _option(self, stage: Stage, unit: ProcessingUnit, after: Mapping[str, float]) -> Any:
        return super()._option(stage, unit, after) if unit.name in self.idle else None


class AblatedScheduler(WorkflowScheduler):
    def __init__(self, units: Sequence[ProcessingUnit], profiles: Profiles, ablation: Ablation) -> None:
        super().__init__(units, profiles)
        self._ablation = ablation
        self.placer = Placer if ablation.look_ahead else _IdleOnly
        if not ablation.partition:
            self._predictions = _FixedShapes(profiles)

    def _able(self, stage: Stage, *, lost: bool = False) -> Sequence[ProcessingUnit]:
        mapped = self._ablation.static_map or {}
        wanted = mapped.get(stage.name) or mapped.get(stage.operation.model)
        able = super()._able(stage, lost=lost)
        return [unit for unit in able if wanted in (None, unit.name, unit.name.partition(" ")[0])]

    def _ranks(self, now: float, able: Mapping[Stage, Sequence[ProcessingUnit]]) -> dict[Stage, float]:
        return super()._ranks(now, able) if self._ablation.criticality else dict.fromkeys(able, 0.0)
