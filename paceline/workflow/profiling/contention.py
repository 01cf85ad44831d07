"""What launches took beside others, as samples from which their slowdown is fitted.

Samples are kept in bins of a third of an octave of bandwidth, the newest ones of each; a bin counts with its medians,
so that single samples from a suspended or a stolen processor change nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Final

from paceline.workflow.regression import Slowdown, fit_slowdown

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
