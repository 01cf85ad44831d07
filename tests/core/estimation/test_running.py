"""Running estimates against the closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.estimation import LineFit, MovingAverage

numbers = st.floats(-1000, 1000)


def test_without_measurements_there_is_no_estimate() -> None:
    assert MovingAverage().value is None
    assert LineFit().at(3.0) is None


@given(st.lists(numbers, min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_moving_average_is_the_weighted_mean(values: list[float], weight: float) -> None:
    average = MovingAverage(weight)
    for value in values:
        average.add(value)
    weights = [(1 - weight) ** age for age in range(len(values))][::-1]
    assert average.value == pytest.approx(np.average(values, weights=weights), abs=1e-6)


@given(st.floats(0, 1e5), st.floats(-1, 1), st.integers(3, 40), st.sampled_from([1.0, 0.9]))
def test_a_line_is_recovered_far_from_the_origin(origin: float, slope: float, count: int, memory: float) -> None:
    fit = LineFit(memory)
    for i in range(count):
        fit.add(origin + i, 5.0 + slope * i)
    assert fit.slope == pytest.approx(slope, abs=1e-6)
    assert fit.at(origin + 2 * count) == pytest.approx(5.0 + slope * 2 * count, abs=1e-4)


@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=20, unique_by=lambda point: round(point[0])))
def test_the_fit_is_the_least_squares_line_with_decaying_weights(points: list[tuple[float, float]]) -> None:
    memory, fit = 0.8, LineFit(0.8)
    for x, y in points:
        fit.add(x, y)
    weights = np.array([memory**age for age in range(len(points))][::-1])
    x, y = np.array(points).T
    middle_x, middle_y = np.average(x, weights=weights), np.average(y, weights=weights)
    slope = float((weights * (x - middle_x) * (y - middle_y)).sum() / (weights * (x - middle_x) ** 2).sum())
    assert fit.slope == pytest.approx(slope, rel=1e-6, abs=1e-6)
    assert fit.at(0.0) == pytest.approx(middle_y - slope * middle_x, rel=1e-6, abs=1e-4)


def test_points_of_one_position_give_their_mean() -> None:
    fit = LineFit()
    fit.add(7.0, 1.0)
    fit.add(7.0, 3.0)
    assert (fit.slope, fit.at(100.0)) == (0.0, 2.0)
