"""What steps take, by their rows, as the last steps have shown it: how much longer a step becomes by more rows.

No line is assumed: on a GPU rows are free until there are many, on a CPU each has its price, and beside both stands
what the caller does for a row until its step counts as done. Medians by size class are made to rise with the rows and
joined. A class is forgotten when it has not been seen for a while, since answers grow and machines get busy. Knows no
clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from paceline.core.batching.prefill_pace import size_class
from paceline.core.estimation.running import RecentMedian

MEMORY: Final = 256  # steps for which a time is remembered, and after which few rows are measured anew
_GROWTH: Final = 2.0  # of the rows beyond the largest step seen: what they take is guessed no further


@dataclass(slots=True)
class StepTimes:
    """Seconds of steps without chunks of prompts."""

    _steps: int = 0
    _medians: dict[int, RecentMedian] = field(default_factory=dict)  # by size class
    _seen: dict[int, int] = field(default_factory=dict)  # by size class: the last step of it
    _curve: list[tuple[int, float]] = field(default_factory=list)  # rows and seconds, both rising; empty: stale

    def record(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long, s."""
        if rows <= 0 or seconds <= 0.0:
            return
        self._steps += 1
        for size in [size for size, step in self._seen.items() if self._steps - step > MEMORY]:
            del self._medians[size], self._seen[size]
        size = size_class(rows)
        self._medians.setdefault(size, RecentMedian(3)).add(seconds)
        self._seen[size] = self._steps
        self._curve = []

    def __bool__(self) -> bool:
        """True once anything was recorded."""
        return bool(self._medians)

    @property
    def most_rows(self) -> int:
        """Rows up to which `at` is worth anything."""
        return int(_GROWTH * max(self._medians)) if self._medians else 0

    def knows(self, rows: int) -> bool:
        """True if a step of about so many rows, or fewer, was seen."""
        return min(self._medians, default=rows + 1) <= 2 * rows

    def at(self, rows: int) -> float:
        """Seconds of a step of so many rows. Something must have been recorded."""
        curve = self._curve = self._curve or self._rising()
        (low, low_s), (high, high_s) = curve[0], curve[-1]
        slope = (high_s - low_s) / (high - low) if high > low else 0.0
        if rows >= high:
            return high_s + slope * (rows - high)
        if rows <= low:
            return max(low_s + slope * (rows - low), low_s * rows / low)
        place = bisect_left(curve, (rows, 0.0))
        (left, left_s), (right, right_s) = curve[place - 1], curve[place]
        return left_s + (right_s - left_s) * (rows - left) / (right - left)

    def _rising(self) -> list[tuple[int, float]]:
        """The medians, where neighbours that fall are replaced by their mean (pool adjacent violators)."""
        pools: list[tuple[float, list[int]]] = []  # mean seconds, and the sizes that share it
        for size in sorted(self._medians):
            seconds, sizes = self._medians[size].value or 0.0, [size]
            while pools and pools[-1][0] >= seconds:
                before, others = pools.pop()
                seconds = (before * len(others) + seconds * len(sizes)) / (len(others) + len(sizes))
                sizes = others + sizes
            pools.append((seconds, sizes))
        return [(size, seconds) for seconds, sizes in pools for size in sizes]
