"""Profiles of operations: seconds by shape and unit, slowdowns beside other work, and what is learnt while they run."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np

from paceline.workflow.activity import ALONE, Overlap, Slowdown, fit_slowdown, nonnegative_least_squares

# What launches took beside others, as samples from which their slowdown is fitted.
#
# Samples are kept in bins of a third of an octave of bandwidth, the newest ones of each; a bin counts with its
# medians, so that single samples from a suspended or a stolen processor change nothing.


BINS: Final = 24  # at most; that which has had no sample for longest is forgotten
KEPT: Final = 24  # samples of a bin
ENOUGH: Final = 3  # samples before a bin counts
PER_OCTAVE: Final = 3
LOWEST: Final = 1e-4  # GB/s; below that, a launch asks for nothing that others would miss
HIGHEST: Final = 1e6
FASTEST, SLOWEST = 0.25, 64.0  # factors beyond these are of a clock, not of a memory


class ContentionSamples:
    """Samples of (GB/s that all launches on the memory ask for, seconds ÷ seconds alone) of one operation."""

    def __init__(self, samples: Iterable[tuple[float, float]] = ()) -> None:
        self._bins: dict[int, deque[tuple[float, float]]] = {}
        for bandwidth, factor in samples:
            self.add(bandwidth, factor)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return (sample for kept in self._bins.values() for sample in kept)

    def __len__(self) -> int:
        return sum(map(len, self._bins.values()))

    def add(self, bandwidth: float, factor: float) -> bool:
        """Whether the sample is believed."""
        if not (LOWEST <= bandwidth <= HIGHEST and FASTEST <= factor <= SLOWEST):
            return False
        place = math.floor(PER_OCTAVE * math.log2(bandwidth))
        kept = self._bins.pop(place, None) or deque(maxlen=KEPT)
        kept.append((bandwidth, factor))
        self._bins[place] = kept  # the last one now
        if len(self._bins) > BINS:
            del self._bins[next(iter(self._bins))]
        return True

    def fit(self) -> Slowdown:
        """The slowdown, with a knot in each bin that counts; none where less than two do."""
        bins = sorted(place for place, kept in self._bins.items() if len(kept) >= ENOUGH)
        if len(bins) < 2:
            return Slowdown()
        knots, samples = [], []
        for place in bins:
            bandwidths, factors = zip(*self._bins[place], strict=True)
            knots.append(median(bandwidths))
            samples += [(knots[-1], median(factors))] * len(factors)
        return fit_slowdown(samples, knots)


# What an operation takes on a kind of unit: seconds and bandwidth by shape, and slowdown under contention.
#
# An operation is a model and a phase, as "chat/decode". A shape is how many items (chunks, tokens) one launch takes.
# Between the shapes that were profiled, values are interpolated: the curve need not be monotone; beyond them, seconds
# follow a non-negative regression on (1, shape). Dependence on the length of a context is not modelled.


PROFILE_VERSION = 1


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
        return json.dumps({"version": PROFILE_VERSION, "profiles": rows}, indent=1)

    @staticmethod
    def from_json(text: str) -> ProfileStore:
        """Raises ValueError for anything but what `to_json` wrote. Learnt profiles come back as profiled ones."""
        try:
            read = json.loads(text)
            if read["version"] != PROFILE_VERSION:
                raise ValueError(f"profiles of version {read['version']}; this build reads {PROFILE_VERSION}")
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


# Profiles that go on learning: from a measurement in advance, or from nothing, by the launches that have ended.
#
# Seconds of a shape are the median of its newest launches that ran alone. A launch beside others tells the slowdown:
# its seconds, over those alone, at the bandwidth that was asked for meanwhile. Memory is bounded, whatever runs.


LEARNT_VERSION: Final = 1
SHAPES: Final = 16  # of an operation
WINDOW: Final = 16  # launches of a shape
PRIOR: Final = 4  # launches that a measured or stored median counts as
OPERATIONS: Final = 32
REFIT: Final = 8  # new samples until a slowdown is fitted again
APART: Final = 0.1  # a launch that shared its memory for a smaller part of its time ran alone
LONGEST: Final = 86_400.0  # s
Key = tuple[str, str]  # operation, kind of unit
Demand = Callable[[str, str, int], float]  # bytes that a launch of an operation, a kind and a shape moves; 0: unknown


@dataclass(slots=True)
class _Learning:
    """What is known of one operation on one kind of unit."""

    padded: bool = False
    windows: dict[int, deque[float]] = field(default_factory=dict)  # shape -> seconds of launches
    moved: dict[int, float] = field(default_factory=dict)  # shape -> GB of a launch
    samples: ContentionSamples = field(default_factory=ContentionSamples)
    slowdown: Slowdown = field(default_factory=Slowdown)
    guessed: bool = False  # no launch ran alone yet
    new: int = 0  # samples since the last fit

    def profile(self) -> OperationProfile:
        points = []
        for shape, window in self.windows.items():
            seconds = median(window)
            points.append(ShapePoint(shape, seconds, self.moved[shape] / seconds))
        return OperationProfile(points, self.slowdown, padded=self.padded)


class LearningProfiles(ProfileStore):
    """demand: tells the bytes of shapes that were not measured."""

    def __init__(
        self,
        profiles: Mapping[Key, OperationProfile] | None = None,
        samples: Mapping[Key, ContentionSamples] | None = None,
        demand: Demand | None = None,
    ) -> None:
        super().__init__(profiles)
        self.demand = demand or (lambda *_: 0.0)
        self._learning: dict[Key, _Learning] = {}
        for key, profile in self._profiles.items():
            self._learning[key] = _known(profile, (samples or {}).get(key))

    def knows(self, operation: str, kind: str) -> bool:
        """Whether a launch of it has run alone."""
        found = self._learning.get((operation, kind))
        return found is not None and not found.guessed

    def learn(self, operation: str, kind: str, shape: int, seconds: float, overlap: Overlap = ALONE) -> None:
        """Record a launch. What is no time at all is dropped."""
        if shape < 1 or not 1e-9 <= seconds <= LONGEST:
            return
        key = operation, kind
        found = self._learning.pop(key, None) or _Learning(guessed=True)
        self._learning[key] = found  # the last one now
        if len(self._learning) > OPERATIONS:
            self.forget(*next(iter(self._learning)))
        alone = overlap.share < APART
        if alone and found.guessed:
            found.windows.clear()
            found.guessed = False
        own = 0.0
        if not found.guessed and found.windows:
            profile = self._profiles.get(key) or found.profile()
            own = profile.bandwidth(shape)
            self._contended(found, own + overlap.bandwidth, seconds / profile.seconds(shape), own)
        if alone or found.guessed:
            self._alone(key, found, shape, seconds)
        self._profiles[key] = found.profile()
        self.revision += 1

    def forget(self, operation: str, kind: str) -> None:
        self._learning.pop((operation, kind), None)
        super().forget(operation, kind)

    def adopt(self, measured: LearningProfiles) -> None:
        """Take what was measured anew in place of what is known of the same operations."""
        for key, found in measured._learning.items():
            self._learning[key] = found
            self._profiles[key] = found.profile()
        self.revision += 1

    def samples(self, operation: str, kind: str) -> ContentionSamples:
        found = self._learning.get((operation, kind))
        return ContentionSamples() if found is None else found.samples

    def items(self) -> Iterator[tuple[Key, OperationProfile]]:
        return iter(sorted(self._profiles.items()))

    def to_json(self) -> str:
        rows = [
            {**row_of(*key, profile), "samples": [[float(f"{n:.4g}") for n in sample] for sample in self.samples(*key)]}
            for key, profile in self.items()
            if self.knows(*key)  # what was never alone is no base for a slowdown
        ]
        return json.dumps({"version": LEARNT_VERSION, "profiles": rows}, allow_nan=False)

    @staticmethod
    def from_json(text: str, demand: Demand | None = None) -> LearningProfiles:
        """Raises ValueError for anything but what `to_json` wrote."""
        try:
            read = json.loads(text)
            if read["version"] != LEARNT_VERSION:
                raise ValueError(f"learnt profiles of version {read['version']}; this build reads {LEARNT_VERSION}")
            rows = read["profiles"][:OPERATIONS]
            profiles = dict(profile_of(row) for row in rows)
            samples = {
                (str(row["operation"]), str(row["unit"])): ContentionSamples(
                    (float(gb_s), float(factor)) for gb_s, factor in row["samples"]
                )
                for row in rows
            }
        except (KeyError, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"not a file of learnt profiles: {error}") from error
        return LearningProfiles(profiles, samples, demand)

    def _contended(self, found: _Learning, used: float, factor: float, own: float) -> None:
        """A sample of the slowdown. Where the bandwidth of one of both is not known, it tells nothing."""
        if own < LOWEST or not found.samples.add(used, factor):
            return
        found.new += 1
        if found.new >= REFIT or len(found.samples) < REFIT:
            found.new = 0
            found.slowdown = found.samples.fit()

    def _alone(self, key: Key, found: _Learning, shape: int, seconds: float) -> None:
        if shape not in found.windows and len(found.windows) >= SHAPES:  # counts for the nearest one
            nearest = min(found.windows, key=lambda each: abs(math.log(each / shape)))
            seconds *= nearest / shape
            shape = nearest
        found.windows.setdefault(shape, deque(maxlen=WINDOW)).append(seconds)
        found.moved.setdefault(shape, self.demand(*key, shape) / 1e9)


def _known(profile: OperationProfile, samples: ContentionSamples | None) -> _Learning:
    found = _Learning(profile.padded, samples=samples or ContentionSamples(), slowdown=profile.slowdown)
    for point in profile.points[-SHAPES:]:
        found.windows[point.shape] = deque([point.seconds] * PRIOR, maxlen=WINDOW)
        found.moved[point.shape] = point.bandwidth * point.seconds
    return found
