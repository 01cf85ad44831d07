"""Profiles of operations: seconds by shape on a kind of unit, and what is learnt of them while they run.

An operation is a model and a phase, as "chat/decode". A shape is how many items (chunks, tokens) one launch takes.
Between the shapes that are known, seconds are interpolated: the curve need not be monotone; beyond them, they follow a
non-negative regression on (1, shape). So this is no `core.clock.StepClock`, whose times rise: a shape is chosen, and
the best one may be where they fall. Dependence on the length of a context, and on what runs beside a launch, is not
modelled.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from statistics import fmean, linear_regression, median
from typing import Final


class OperationProfile:
    """Seconds of one operation on one kind of unit."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """seconds: of a launch, by shape. Raises ValueError where one is not above 0, or none is there."""
        if not seconds or min(map(min, seconds.items())) <= 0:
            raise ValueError("a profile has shapes and seconds above 0")
        self.shapes = tuple(sorted(seconds))
        self._seconds = [seconds[shape] for shape in self.shapes]
        self._line = _regression(self.shapes, self._seconds)

    def seconds(self, items: int) -> float:
        """Seconds of a launch of so many items, at least 1."""
        i = bisect_left(self.shapes, items)
        if i < len(self.shapes) and self.shapes[i] == items:
            return self._seconds[i]
        if 0 < i < len(self.shapes):
            low, high = self.shapes[i - 1], self.shapes[i]
            return self._seconds[i - 1] + (self._seconds[i] - self._seconds[i - 1]) * (items - low) / (high - low)
        fixed, each = self._line
        nearest = 0 if i == 0 else -1
        return self._seconds[nearest] * (fixed + each * items) / (fixed + each * self.shapes[nearest])


def _regression(shapes: tuple[int, ...], seconds: list[float]) -> tuple[float, float]:
    """(seconds of a launch, seconds of an item) by least squares, neither below 0; of one shape: all of its items."""
    if len(shapes) == 1:
        return 0.0, seconds[0] / shapes[0]
    line = linear_regression(shapes, seconds)
    if line.slope < 0.0:
        return fmean(seconds), 0.0
    if line.intercept < 0.0:
        return 0.0, linear_regression(shapes, seconds, proportional=True).slope
    return line.intercept, line.slope


SHAPES: Final = 16  # of an operation that are learnt
WINDOW: Final = 16  # launches of a shape
OPERATIONS: Final = 32
LONGEST: Final = 86_400.0  # s
Key = tuple[str, str]  # operation, kind of unit


class Profiles:
    """Profiles by operation and kind of unit, which are learnt: seconds of a shape are the median of its newest
    launches. Memory is bounded, whatever runs."""

    def __init__(self) -> None:
        self._windows: dict[Key, dict[int, deque[float]]] = {}
        self._learnt: dict[Key, OperationProfile] = {}

    def get(self, operation: str, kind: str) -> OperationProfile | None:
        """None: it never ran there."""
        return self._learnt.get((operation, kind))

    def learn(self, operation: str, kind: str, shape: int, seconds: float) -> None:
        """Record a launch. What is no time at all is dropped."""
        key = operation, kind
        if shape < 1 or not 1e-9 <= seconds <= LONGEST:
            return
        windows = self._windows[key] = self._windows.pop(key, {})  # the last one now
        if len(self._windows) > OPERATIONS:
            self.forget(*next(iter(self._windows)))
        if shape not in windows and len(windows) >= SHAPES:  # counts for the nearest one
            nearest = min(windows, key=lambda each: abs(math.log(each / shape)))
            seconds *= nearest / shape
            shape = nearest
        windows.setdefault(shape, deque(maxlen=WINDOW)).append(seconds)
        self._learnt[key] = OperationProfile({each: median(window) for each, window in windows.items()})

    def forget(self, operation: str, kind: str) -> None:
        """As if it had never run."""
        self._windows.pop((operation, kind), None)
        self._learnt.pop((operation, kind), None)
