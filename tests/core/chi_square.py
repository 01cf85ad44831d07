"""Pearson's chi-square test without a statistics library. The tests' samples are seeded, so results are repeatable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def assert_drawn_from(
    observed: Sequence[int] | NDArray[np.int64], probs: Sequence[float] | NDArray[np.float64]
) -> None:
    """observed: counts per outcome; probs: of the same outcomes, summing to 1. Fails beyond four sigma (p < 4e-5)."""
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
        return
    # Wilson and Hilferty 1931: the cube root of chi-square is nearly normal.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.0 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit, (statistic, limit, freedom)
