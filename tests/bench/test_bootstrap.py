"""Intervals of medians over the rounds of a bench."""

from __future__ import annotations

import pytest

from bench.bootstrap import median_of, ratio_of


def test_the_interval_holds_the_median_and_lies_within_the_rounds() -> None:
    estimate = median_of([1.0, 9.0, 5.0, 4.0, 6.0])
    assert estimate.value == 5.0
    assert 1.0 <= estimate.low <= 5.0 <= estimate.high <= 9.0
    assert estimate.low < estimate.high
    assert estimate == median_of([1.0, 9.0, 5.0, 4.0, 6.0])  # the resampling has a seed


def test_one_round_has_no_spread() -> None:
    assert median_of([2.0]).interval == [2.0, 2.0]


def test_a_ratio_is_that_of_each_round() -> None:
    estimate = ratio_of([2.0, 40.0, 6.0], [1.0, 20.0, 3.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)
    assert estimate.times(1e3).value == pytest.approx(2_000.0)


def test_series_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio_of([1.0, 2.0], [1.0])
