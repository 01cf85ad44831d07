"""Counts of values by size, as Prometheus keeps them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Values in buckets; adding one costs the same however many there are."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: greatest value of each bucket but the last, which has none; ascending."""
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must ascend")
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, values up to it); the last bound is infinite."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True))
