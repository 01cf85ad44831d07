"""What an operation takes on a kind of unit: seconds and bandwidth by shape, and slowdown under contention.

An operation is a model and a phase, as "chat/decode". A shape is how many items (chunks, tokens) one launch takes.
Between the shapes that were profiled, values are interpolated: the curve need not be monotone; beyond them, seconds
follow a non-negative regression on (1, shape). Dependence on the length of a context is not modelled.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.workflow.activity import ALONE, Overlap
from paceline.workflow.regression import Slowdown, nonnegative_least_squares

VERSION = 1


@dataclass(frozen=True, slots=True)
class ShapePoint:
    """A profiled shape."""

    shape: int  # items a launch
    seconds: float  # s, alone on its memory
    bandwidth: float  # GB/s that the launch asks for


class OperationProfile:
    """Seconds, bandwidth and slowdown of one operation on one kind of unit.

    padded: the unit runs compiled shapes only, and a launch with fewer items takes as long as a full one.
    """

    def __init__(self, points: Sequence[ShapePoint], slowdown: Slowdown | None = None, *, padded: bool = False) -> None:
        if not points or min(min(p.shape, p.seconds) for p in points) <= 0 or min(p.bandwidth for p in points) < 0:
            raise ValueError("a profile has shapes and seconds above 0, and bandwidths of at least 0")
        self.points = tuple(sorted(points, key=lambda point: point.shape))
        self.shapes = tuple(point.shape for point in self.points)
        if len(set(self.shapes)) < len(self.shapes):
            raise ValueError("a profile has each shape once")
        self._seconds = [point.seconds for point in self.points]
        self._bandwidths = [point.bandwidth for point in self.points]
        self.slowdown = slowdown or Slowdown()
        self.padded = padded
        self._line = self._regression()

    def seconds(self, items: int) -> float:
        """Seconds of a launch of so many items, at least 1, alone on its memory."""
        if self.padded:
            whole, rest = divmod(items, self.shapes[-1])
            if whole and rest:
                return whole * self.points[-1].seconds + self.seconds(rest)
            if whole:
                return whole * self.points[-1].seconds
            items = self.shapes[min(bisect_left(self.shapes, items), len(self.shapes) - 1)]
        return self._value(items, self._seconds)

    def bandwidth(self, items: int) -> float:
        """GB/s that a launch of so many items asks for."""
        kept = min(max(items, self.shapes[0]), self.shapes[-1])
        return self._value(kept, self._bandwidths)

    def _value(self, items: int, values: Sequence[float]) -> float:
        i = bisect_left(self.shapes, items)
        if i < len(self.shapes) and self.shapes[i] == items:
            return values[i]
        if 0 < i < len(self.shapes):
            low, high = self.shapes[i - 1], self.shapes[i]
            return values[i - 1] + (values[i] - values[i - 1]) * (items - low) / (high - low)
        fixed, each = self._line
        nearest = self.shapes[0] if i == 0 else self.shapes[-1]
        return values[0 if i == 0 else -1] * (fixed + each * items) / (fixed + each * nearest)

    def _regression(self) -> tuple[float, float]:
        """(seconds of a launch, seconds of an item), neither below 0; one point: all seconds are of its items."""
        shapes = np.array(self.shapes, dtype=float)
        seconds = np.array([point.seconds for point in self.points])
        if len(self.points) == 1:
            return 0.0, float(seconds[0] / shapes[0])
        fixed, each = nonnegative_least_squares(np.stack([np.ones_like(shapes), shapes], axis=1), seconds)
        return float(fixed), float(each)


@dataclass(slots=True)
class _Learnt:
    """Means of launches that were run without a profile, by shape."""

    seconds: dict[int, tuple[float, int]] = field(default_factory=dict)  # shape -> (mean, launches)

    def add(self, shape: int, seconds: float) -> OperationProfile:
        mean, count = self.seconds.get(shape, (0.0, 0))
        self.seconds[shape] = (mean + (seconds - mean) / (count + 1), count + 1)
        return OperationProfile([ShapePoint(n, max(s, 1e-9), 0.0) for n, (s, _) in self.seconds.items()])


class ProfileStore:
    """Profiles by operation and kind of unit, with those that were learnt by running."""

    def __init__(self, profiles: Mapping[tuple[str, str], OperationProfile] | None = None) -> None:
        self._profiles = dict(profiles or {})
        self._learnt: dict[tuple[str, str], _Learnt] = {}
        self.revision = 0  # rises when a profile changes

    def get(self, operation: str, kind: str) -> OperationProfile | None:
        """None: never profiled and never run there."""
        return self._profiles.get((operation, kind))

    def knows(self, operation: str, kind: str) -> bool:
        """Whether it was profiled, and not learnt by running."""
        return (operation, kind) in self._profiles and (operation, kind) not in self._learnt

    def learn(
        self,
        operation: str,
        kind: str,
        shape: int,
        seconds: float,
        overlap: Overlap = ALONE,  # noqa: ARG002
    ) -> None:
        """Record a launch of an operation that was not profiled there. Its bandwidth stays unknown: 0. overlap: with
        others on its memory; not used here, see `LearningProfiles`."""
        if not self.knows(operation, kind):
            learnt = self._learnt.setdefault((operation, kind), _Learnt())
            self._profiles[operation, kind] = learnt.add(shape, seconds)
            self.revision += 1

    def forget(self, operation: str, kind: str) -> None:
        """As if it had never run."""
        self._learnt.pop((operation, kind), None)
        if self._profiles.pop((operation, kind), None) is not None:
            self.revision += 1

    def to_json(self) -> str:
        rows = [row_of(*key, profile) for key, profile in sorted(self._profiles.items())]
        return json.dumps({"version": VERSION, "profiles": rows}, indent=1)

    @staticmethod
    def from_json(text: str) -> ProfileStore:
        """Raises ValueError for anything but what `to_json` wrote. Learnt profiles come back as profiled ones."""
        try:
            read = json.loads(text)
            if read["version"] != VERSION:
                raise ValueError(f"profiles of version {read['version']}; this build reads {VERSION}")
            profiles = dict(profile_of(row) for row in read["profiles"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a file of profiles: {error}") from error
        return ProfileStore(profiles)


def row_of(operation: str, kind: str, profile: OperationProfile) -> dict[str, Any]:
    """The JSON form of one profile."""
    return {
        "operation": operation,
        "unit": kind,
        "padded": profile.padded,
        "points": [[point.shape, point.seconds, point.bandwidth] for point in profile.points],
        "slowdown": [list(pair) for pair in zip(profile.slowdown.knots, profile.slowdown.factors, strict=True)],
    }


def profile_of(row: Mapping[str, Any]) -> tuple[tuple[str, str], OperationProfile]:
    """(operation, kind) and profile of what `row_of` made. Raises KeyError, TypeError and ValueError."""
    points = [ShapePoint(int(n), float(seconds), float(gb_s)) for n, seconds, gb_s in row["points"]]
    pairs = [(float(knot), float(factor)) for knot, factor in row["slowdown"]]
    numbers = [number for pair in pairs for number in pair] + [n for p in points for n in (p.seconds, p.bandwidth)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a profile has finite numbers")
    slowdown = Slowdown(tuple(knot for knot, _ in pairs), tuple(factor for _, factor in pairs))
    return (str(row["operation"]), str(row["unit"])), OperationProfile(points, slowdown, padded=bool(row["padded"]))
