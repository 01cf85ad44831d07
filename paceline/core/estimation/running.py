"""Running estimates: means, medians and line fits of measured values. No clock: the caller supplies the numbers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median


@dataclass(slots=True)
class MovingAverage:
    """Exponentially weighted mean, with the bias correction of Adam (Kingma and Ba 2015)."""

    weight: float = 0.1  # of the newest value, in (0, 1]
    _sum: float = 0.0
    _share: float = 0.0  # sum of the weights so far

    def add(self, value: float) -> None:
        self._sum += self.weight * (value - self._sum)
        self._share += self.weight * (1.0 - self._share)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return self._sum / self._share if self._share else None


@dataclass(slots=True)
class RecentMedian:
    """Median of the last few values, robust against stalls."""

    size: int = 9
    _values: deque[float] = field(default_factory=deque)

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) > self.size:
            self._values.popleft()

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return median(self._values) if self._values else None


@dataclass(slots=True)
class LineFit:
    """Least squares of y over x, e.g. decode seconds over position, with exponentially decaying weights.

    Centred updates (Welford's), so that large positions cost no precision.
    """

    memory: float = 1.0  # factor on older weights per new point, in (0, 1]; 1: no decay
    _count: float = 0.0
    _mean_x: float = 0.0
    _mean_y: float = 0.0
    _spread: float = 0.0  # sum of (x - mean_x)**2
    _joint: float = 0.0  # sum of (x - mean_x) * (y - mean_y)

    def add(self, x: float, y: float) -> None:
        self._count = self.memory * self._count + 1.0
        delta = x - self._mean_x
        self._mean_x += delta / self._count
        self._mean_y += (y - self._mean_y) / self._count
        self._spread = self.memory * self._spread + delta * (x - self._mean_x)
        self._joint = self.memory * self._joint + delta * (y - self._mean_y)

    @property
    def slope(self) -> float:
        """0 while all points have the same x."""
        return self._joint / self._spread if self._spread > 0.0 else 0.0

    def at(self, x: float) -> float | None:
        """The line's value; None before the first point."""
        return self._mean_y + self.slope * (x - self._mean_x) if self._count else None
