"""Seconds of a step by its rows, estimated from the last steps: how much longer a step becomes by more rows.

No line is assumed: on a GPU rows are free until there are many, on a CPU each has its price, and beside both stands
what the caller does for a row until its step counts as done. Times of sizes alike are taken together, by their lower
third since a stall only adds; these are made to rise with the rows, and joined. What was seen of a size is forgotten
when it is old, the sooner the less it was, and counts again when more is seen. Knows no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

MEMORY: Final = 256  # steps for which a size seen often enough is remembered, and few rows are not measured anew
SEEN: Final = 9  # steps of a size that are kept
_FEW: Final = 3  # steps of a size, with which what they take counts as known
_GROWTH: Final = 2.0  # of the rows beyond the largest step seen: what they take is guessed no further


@dataclass(slots=True)
class StepTimes:
    """Seconds of steps without chunks of prompts."""

    _steps: int = 0
    _seen: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)  # by size class: rows and seconds
    _last: dict[int, int] = field(default_factory=dict)  # by size class: the last step of it
    _curve: list[tuple[float, float]] = field(default_factory=list)  # rows and seconds, neither falls; empty: stale

    def record(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long, s."""
        if rows <= 0 or seconds <= 0.0:
            return
        self._steps += 1
        size = _size_class(rows)
        self._seen.setdefault(size, deque(maxlen=SEEN)).append((rows, seconds))
        self._last[size] = self._steps
        self._curve = []

    def __bool__(self) -> bool:
        """True once anything was recorded."""
        return bool(self._seen)

    @property
    def most_rows(self) -> int:
        """Rows up to which `at` is worth anything."""
        return int(_GROWTH * self._rising()[-1][0])

    def knows(self, rows: int) -> bool:
        """True if steps of about so many rows, or fewer, were seen, more than stalls are likely to be."""
        return any(
            len(seen) >= _FEW and seen[-1][0] <= 2 * rows
            for size, seen in self._seen.items()
            if self._is_remembered(size)
        )

    def at(self, rows: int) -> float:
        """Seconds of a step of so many rows. Something must have been recorded."""
        curve = self._rising()
        (low, low_s), (high, high_s) = curve[0], curve[-1]
        slope = (high_s - low_s) / (high - low) if high > low else 0.0
        if rows >= high:
            return high_s + slope * (rows - high)
        if rows <= low:
            return max(low_s + slope * (rows - low), low_s * rows / low)
        place = bisect_left(curve, (rows, 0.0))
        (left, left_s), (right, right_s) = curve[place - 1], curve[place]
        return left_s + (right_s - left_s) * (rows - left) / (right - left)

    def _rising(self) -> list[tuple[float, float]]:
        """Times of the sizes that are remembered. Neighbours that fall are replaced by their mean, weighted by the
        steps seen (pool adjacent violators)."""
        if self._curve:
            return self._curve
        pools: list[tuple[float, int, list[float]]] = []  # seconds, weight, and the rows that have them
        for size in sorted(self._seen):
            seen = self._seen[size]
            if not self._is_remembered(size):
                continue
            seconds, weight = sorted(seconds for _, seconds in seen)[(len(seen) - 1) // 3], len(seen)
            rows = [fmean(rows for rows, _ in seen)]
            while pools and pools[-1][0] >= seconds:
                before, others, smaller = pools.pop()
                seconds = (before * others + seconds * weight) / (others + weight)
                weight, rows = others + weight, smaller + rows
            pools.append((seconds, weight, rows))
        self._curve = [(each, seconds) for seconds, _, rows in pools for each in rows]
        return self._curve

    def _is_remembered(self, size: int) -> bool:
        return self._steps - self._last[size] <= MEMORY * len(self._seen[size]) // SEEN


def _size_class(rows: int) -> int:
    """The smallest number of rows of a class, whose sizes differ by less than a half."""
    shift = max(0, rows.bit_length() - 2)
    return (rows >> shift) << shift
