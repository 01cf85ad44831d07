"""Regression with non-negative coefficients, and slowdowns that rise with the bandwidth in use.

A slowdown is 1 plus a non-negative combination of ramps between knots: that is every piecewise linear function that
never falls, so fitting it by non-negative least squares is isotonic regression (specs 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nonnegative_least_squares(matrix: Array, values: Array) -> Array:
    """Minimise |matrix · x - values| over x >= 0 (Lawson and Hanson 1974, chapter 23).

    matrix: (samples, features); values: (samples,). Returns (features,).
    """
    features = matrix.shape[1]
    found = np.zeros(features)
    free = np.zeros(features, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ values).max(initial=0.0)))
    for _ in range(10 * features + 10):
        gradient = matrix.T @ (values - matrix @ found)
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[int(np.argmax(np.where(free, -np.inf, gradient)))] = True
        while True:
            trial = np.zeros(features)
            trial[free] = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
            wrong = free & (trial <= 0.0)
            if not wrong.any():
                break
            step = float(np.min(found[wrong] / (found[wrong] - trial[wrong] + 1e-300)))
            found = found + step * (trial - found)
            free &= found > 1e-12
            if not free.any():
                trial = np.zeros(features)
                break
        found = trial
    return np.maximum(found, 0.0)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Factor on a launch's seconds by the bandwidth that all launches on its memory ask for (phi of eq. 1).

    1 up to the first knot, linear between knots; beyond the last one, the last slope goes on.
    """

    knots: tuple[float, ...] = ()  # GB/s, rising
    factors: tuple[float, ...] = ()  # at the knots; the first is 1, none is below the one before

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.knots))
        monotone = all(a <= b for a, b in pairwise((1.0, *self.factors)))
        begins = not self.factors or self.factors[0] == 1.0
        if len(self.knots) != len(self.factors) or not (rising and monotone and begins):
            raise ValueError("a slowdown has rising knots and factors that begin at 1 and do not fall")

    def at(self, bandwidth: float) -> float:
        """Factor at so many GB/s."""
        knots, factors = self.knots, self.factors
        if not knots or bandwidth <= knots[0]:
            return 1.0
        i = 1
        while i < len(knots) - 1 and bandwidth > knots[i]:
            i += 1
        if i >= len(knots):
            return factors[-1]
        slope = (factors[i] - factors[i - 1]) / (knots[i] - knots[i - 1])
        return factors[i - 1] + slope * (bandwidth - knots[i - 1])


def fit_slowdown(samples: Sequence[tuple[float, float]], knots: Sequence[float]) -> Slowdown:
    """Slowdown that fits samples of (GB/s, factor) best. knots: GB/s, rising; at least two."""
    used = np.array([bandwidth for bandwidth, _ in samples])
    ramps = [
        np.maximum((used - low) / (high - low), 0.0)
        if high == knots[-1]
        else np.clip((used - low) / (high - low), 0.0, 1.0)
        for low, high in pairwise(knots)
    ]
    above = np.array([factor for _, factor in samples]) - 1.0
    rises = nonnegative_least_squares(np.stack(ramps, axis=1), above)
    factors = (1.0, *(1.0 + float(total) for total in np.cumsum(rises)))
    return Slowdown(tuple(map(float, knots)), factors)
