"""Options of the scheduler. HeRo is the default; switched off one by one they are its ablations and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
