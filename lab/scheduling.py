"""Other policies for the scheduler of workflows: ablations of HeRo, and static maps, which are its baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.workflow.graph import Operation, ProcessingUnit, Stage
from paceline.workflow.placement import SchedulingPolicy
from paceline.workflow.profiles import OperationProfile

FIXED_SHAPE = 8  # most items of a launch without partition


class PaddedProfile(OperationProfile):
    """Profile of a unit that runs compiled shapes only: a launch with fewer items takes as long as a full one."""

    def seconds(self, items: int) -> float:
        whole, rest = divmod(items, self.shapes[-1])
        if whole:
            return whole * super().seconds(self.shapes[-1]) + (self.seconds(rest) if rest else 0.0)
        return super().seconds(next(shape for shape in self.shapes if shape >= items))


@dataclass(frozen=True)
class Ablation(SchedulingPolicy):
    """The scheduler with parts left out."""

    partition: bool = True  # shapes by eq. 3; else fixed ones, texts as a whole, every stage after whole ones
    criticality: bool = True
    look_ahead: bool = True
    # Name of a stage, or model -> name of the one unit it runs on, or first word of its units' names; None: any
    static_map: Mapping[str, str] | None = None

    @property
    def whole_stages(self) -> bool:  # type: ignore[override]  # is not set there
        return not self.partition

    def units(self, stage: Stage, able: Sequence[ProcessingUnit]) -> Sequence[ProcessingUnit]:
        mapped = self.static_map or {}
        wanted = mapped.get(stage.name) or mapped.get(stage.operation.model)
        return [unit for unit in able if wanted in (None, unit.name, unit.name.partition(" ")[0])]

    def shape(self, operation: Operation, items: int, profile: OperationProfile, launch_s: float = 0.0) -> int:
        if self.partition:
            return super().shape(operation, items, profile, launch_s)
        return items if operation.ordered else min(FIXED_SHAPE, items)


def static_map(units: Mapping[str, str]) -> Ablation:
    """A fixed map knows no shapes: up to 8 chunks a launch, texts as a whole, every stage after the one before."""
    return Ablation(partition=False, criticality=False, look_ahead=False, static_map=units)
