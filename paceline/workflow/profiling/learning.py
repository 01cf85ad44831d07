"""Profiles that go on learning: from a measurement in advance, or from nothing, by the launches that have ended.

Seconds of a shape are the median of its newest launches that ran alone. A launch beside others tells the slowdown: its
seconds, over those alone, at the bandwidth that was asked for meanwhile. Memory is bounded, whatever runs.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from paceline.workflow.activity import ALONE, Overlap
from paceline.workflow.profiling.contention import LOWEST, ContentionSamples
from paceline.workflow.profiling.profiles import OperationProfile, ProfileStore, ShapePoint, profile_of, row_of
from paceline.workflow.regression import Slowdown

VERSION: Final = 1
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
        return json.dumps({"version": VERSION, "profiles": rows}, allow_nan=False)

    @staticmethod
    def from_json(text: str, demand: Demand | None = None) -> LearningProfiles:
        """Raises ValueError for anything but what `to_json` wrote."""
        try:
            read = json.loads(text)
            if read["version"] != VERSION:
                raise ValueError(f"learnt profiles of version {read['version']}; this build reads {VERSION}")
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
