"""The shapes in which the work of a sub-stage is cut for a unit (HeRo, eq. 3)."""

from __future__ import annotations

import math

from paceline.workflow.profiling.profiles import OperationProfile


def best_shape(profile: OperationProfile, items: int, most: int | None = None, launch_s: float = 0.0) -> int:
    """Shape with the least ceil(items ÷ shape) · seconds(shape); of equal ones the smallest.

    most: items of a launch. launch_s: s, what each launch takes besides, as to a unit elsewhere.
    """
    shapes = [shape for shape in profile.shapes if most is None or shape <= most] or [profile.shapes[0]]
    return min(shapes, key=lambda shape: math.ceil(items / shape) * (profile.seconds(shape) + launch_s))


def shapes_to_try(
    profile: OperationProfile, items: int, most: int | None = None, launch_s: float = 0.0
) -> tuple[int, ...]:
    """The best shape and its neighbours, which may ask for less bandwidth or be done sooner."""
    shapes = [shape for shape in profile.shapes if most is None or shape <= most] or [profile.shapes[0]]
    at = shapes.index(best_shape(profile, items, most, launch_s))
    return tuple(shapes[max(at - 1, 0) : at + 2])


def seconds_for(profile: OperationProfile, items: int, shape: int) -> float:
    """Seconds for so many items in launches of that shape, alone on the memory; the last may have fewer items."""
    whole, rest = divmod(items, shape)
    return whole * profile.seconds(shape) + (profile.seconds(rest) if rest else 0.0)
