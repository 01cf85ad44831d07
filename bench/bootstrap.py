"""Bootstrap intervals of medians, for benches whose claims are ratios within rounds of one run.

Knows nothing of what is measured. A round gives one ratio; the rounds are resampled with replacement.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RESAMPLES: Final = 2_000
SEED: Final = 0
INSIDE: Final = 0.9  # share of the resampled medians that the interval holds


@dataclass(frozen=True, slots=True)
class Estimate:
    """Median of rounds, with its bootstrap interval: the middle nine tenths of the medians of resampled rounds."""

    value: float
    low: float
    high: float
    rounds: int

    def times(self, factor: float) -> Estimate:
        """In another unit. factor: above 0."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.rounds)

    @property
    def interval(self) -> list[float]:
        """Its bounds in three digits, as a report's conditions hold them."""
        return [float(f"{bound:.3g}") for bound in (self.low, self.high)]


def median_of(values: Sequence[float]) -> Estimate:
    """Median of one value for each round; at least one."""
    draw = random.Random(SEED)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = int(RESAMPLES * (1.0 - INSIDE) / 2.0)
    return Estimate(statistics.median(values), medians[outside], medians[-1 - outside], len(values))


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Median of the ratios of two series, value by value: both of one round."""
    return median_of([a / b for a, b in zip(above, below, strict=True)])
