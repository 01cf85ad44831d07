"""Pearson's chi-square test without a statistics library. The tests' samples are seeded, so results are repeatable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def sigmas(observed: Sequence[int] | NDArray[np.int64], probs: Sequence[float] | NDArray[np.float64]) -> float:
    """How far counts are from what is expected, in standard deviations of chi-square; above 0: further than usual.

    observed: counts per outcome; probs: of the same outcomes, summing to 1.
    """
    counts = np.asarray(observed, dtype=float)
    expected = np.asarray(probs, dtype=float) * counts.sum()
    assert counts[expected == 0.0].sum() == 0, "an impossible outcome was drawn"
    rare = expected < 8.0  # too few for the approximation: pooled
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    usable = expected > 0.0
    statistic = float((((counts - expected)[usable] ** 2) / expected[usable]).sum())
    freedom = int(usable.sum()) - 1
    if freedom == 0:
        return 0.0
    # Wilson and Hilferty 1931: the cube root of chi-square is nearly normal.
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - 1 + spread) / spread**0.5)


def assert_drawn_from(
    observed: Sequence[int] | NDArray[np.int64], probs: Sequence[float] | NDArray[np.float64]
) -> None:
    """Fails beyond four sigma (p < 4e-5). For the arguments see `sigmas`."""
    found = sigmas(observed, probs)
    assert found < 4.0, f"{found:.1f} sigma: {observed} of {probs}"
