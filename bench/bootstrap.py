"""Bootstrap intervals, for benches whose claims are ratios within one run.

Knows nothing of what is measured. Rounds, answers or questions are resampled with replacement.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

RESAMPLES: Final = 2_000
SEED: Final = 0
INSIDE: Final = 0.9  # share of the resampled medians that the interval holds


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of rounds, with its bootstrap interval: the middle nine tenths of its values on resampled rounds."""

    value: float
    low: float
    high: float
    rounds: int

    def times(self, factor: float) -> Estimate:
        """In another unit. factor: above 0."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.rounds)

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def interval(self) -> list[float]:
        """Its bounds in three digits, as a report's conditions hold them."""
        return [float(f"{bound:.3g}") for bound in (self.low, self.high)]


def estimate(count: int, statistic: Callable[[Sequence[int]], float], resamples: int = RESAMPLES) -> Estimate:
    """A statistic of samples by their indices, below `count`; with several groups they are resampled together.

    The interval always holds the value, which a skewed statistic of few samples may leave.
    """
    draw, samples = random.Random(SEED), range(count)
    values = sorted(statistic(draw.choices(samples, k=count)) for _ in range(resamples))
    outside, value = int(resamples * (1.0 - INSIDE) / 2.0), statistic(samples)
    return Estimate(value, min(value, values[outside]), max(value, values[-1 - outside]), count)


def median_of(values: Sequence[float]) -> Estimate:
    """Median of one value for each round; at least one."""
    return estimate(len(values), lambda among: statistics.median([values[i] for i in among]))


def share_of(right: Sequence[bool]) -> Estimate:
    """Share of the true ones."""
    return estimate(len(right), lambda among: sum(right[i] for i in among) / len(right))


def worst_of(estimates: Iterable[Estimate], better: Literal["higher", "lower"]) -> Estimate:
    """Over settings that were measured one by one: the worst value, and the worst bounds.

    The worse bound is that of the worst setting, which is wider than the interval of the worst value.
    """
    found, pick = list(estimates), min if better == "higher" else max
    low, high = pick(each.low for each in found), pick(each.high for each in found)
    return Estimate(pick(each.value for each in found), low, high, min(each.rounds for each in found))


def medians_apart(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Ratio of two medians, each over its own rounds; both are resampled, apart."""
    draw = random.Random(SEED)

    def drawn(values: Sequence[float]) -> float:
        return statistics.median(draw.choices(values, k=len(values)))

    ratios = sorted(drawn(above) / drawn(below) for _ in range(RESAMPLES))
    outside, value = int(RESAMPLES * (1.0 - INSIDE) / 2.0), statistics.median(above) / statistics.median(below)
    return Estimate(value, min(value, ratios[outside]), max(value, ratios[-1 - outside]), min(len(above), len(below)))


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Median of the ratios of two series, value by value: both of one round."""
    return median_of([a / b for a, b in zip(above, below, strict=True)])
