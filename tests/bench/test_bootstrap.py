"""Intervals of medians over the rounds of a bench."""

from __future__ import annotations

import pytest

from bench.bootstrap import Estimate, median_of, ratio_of, share_of, worst_of


def test_the_interval_holds_the_median_and_lies_within_the_rounds() -> None:
    estimate = median_of([1.0, 9.0, 5.0, 4.0, 6.0])
    assert estimate.value == 5.0
    assert 1.0 <= estimate.low <= 5.0 <= estimate.high <= 9.0
    assert estimate.low < estimate.high
    assert estimate == median_of([1.0, 9.0, 5.0, 4.0, 6.0])  # the resampling has a seed


def test_a_ratio_is_that_of_each_round() -> None:
    estimate = ratio_of([2.0, 40.0, 6.0], [1.0, 20.0, 3.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)
    assert estimate.times(1e3).value == pytest.approx(2_000.0)


def test_a_share_of_all_has_no_spread_and_one_of_half_has() -> None:
    assert share_of([True] * 5).bounds == (1.0, 1.0)
    half = share_of([True, False] * 20)
    assert 0.3 < half.low < half.value == 0.5 < half.high < 0.7


def test_the_worst_of_several_has_the_worst_bounds() -> None:
    wide, far = Estimate(3.0, 1.0, 9.0, 5), Estimate(2.0, 1.5, 2.5, 4)
    assert worst_of([wide, far], "higher") == Estimate(2.0, 1.0, 2.5, 4)
    assert worst_of([wide, far], "lower") == Estimate(3.0, 1.5, 9.0, 4)
