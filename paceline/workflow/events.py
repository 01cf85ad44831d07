"""Facts that the scheduler is told, each with the time, and what it wants done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.workflow.graph import SubStage, SubStageId


@dataclass(frozen=True, slots=True)
class Added:
    """Sub-stages appear: a workflow begins, or an agent has decided."""

    now: float  # s
    sub_stages: Sequence[SubStage]


@dataclass(frozen=True, slots=True)
class Resized:
    """The number of items of a sub-stage that has not begun is known now."""

    now: float
    sub_stage: SubStageId
    items: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A launch is done. finished: the open-ended sub-stage it belongs to ends with it."""

    now: float
    launch: int
    finished: bool = False
    items: int | None = None  # that were done: fewer where a text ends, more where it could not be cut; None: all


@dataclass(frozen=True, slots=True)
class Failed:
    """A launch has come to nothing, because of a fault or of a `Cancel`; its unit is free again."""

    now: float
    launch: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Sub-stages are wanted no more."""

    now: float
    sub_stages: Sequence[SubStageId]


@dataclass(frozen=True, slots=True)
class UnitLost:
    """A unit is gone, and its launch with it."""

    now: float
    unit: str
    also: Sequence[str] = ()  # units that are gone with it: nothing that ran on one begins anew on another of them


@dataclass(frozen=True, slots=True)
class UnitBack:
    now: float
    unit: str


@dataclass(frozen=True, slots=True)
class UnitMoved:
    """Moving data to a unit and back takes another time from now on."""

    now: float
    unit: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OtherBegan:
    """Work of no workflow begins on a unit, beside what is launched there: nobody schedules it, and it slows others."""

    now: float
    id: int  # given by whoever tells of it
    unit: str
    operation: str
    items: int


@dataclass(frozen=True, slots=True)
class OtherEnded:
    now: float
    id: int
    items: int | None = None  # that there were; None: all; 0: nothing can be learnt from it


WorkflowEvent = Added | Resized | Ended | Failed | Dropped | UnitLost | UnitBack | UnitMoved | OtherBegan | OtherEnded


@dataclass(frozen=True, slots=True)
class Launch:
    """Run items `first` to `first + count` of a sub-stage on a unit, in a launch of that shape."""

    id: int
    sub_stage: SubStageId
    unit: str
    shape: int
    first: int
    count: int
    forced: bool = False  # beyond the bandwidth limit, because nothing else ran
    criticality: float = 0.0  # s of the workflow from its sub-stage on, as predicted; 0: not known


@dataclass(frozen=True, slots=True)
class Cancel:
    """A launch is wanted no more; `Failed` or `Ended` shall follow."""

    launch: int


@dataclass(frozen=True, slots=True)
class RequestDone:
    """All sub-stages of a request that were added are finished. Once, unless more are added."""

    request: int


@dataclass(frozen=True, slots=True)
class Unrunnable:
    """No unit may run it: none that its inputs may go to holds the model. Its workflow cannot end."""

    sub_stage: SubStageId


WorkflowEffect = Launch | Cancel | RequestDone | Unrunnable
