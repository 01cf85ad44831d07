"""Timing estimates: lines from noisy steps, monotone forward times, delays without a common clock, acceptance."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.estimation import (
    PRIOR,
    WINDOW,
    DecodeSpeed,
    DecodeTime,
    ForwardTime,
    Line,
    TimingModel,
    fit_line,
)


def steps(slope: float, intercept: float, count: int, seed: int, stalls: float = 0.05) -> list[tuple[int, float]]:
    """(position, seconds) with 2 % of noise; some steps take five times as long."""
    rng = np.random.default_rng(seed)
    clean = [(position, intercept + slope * position) for position in range(count)]
    return [
        (position, value * float(1 + 0.02 * rng.standard_normal()) * (5.0 if rng.random() < stalls else 1.0))
        for position, value in clean
    ]


@given(st.floats(0.01, 0.3), st.floats(0.0, 1e-3), st.integers(0, 100))
def test_a_line_is_found_in_noise_and_stalls(intercept: float, slope: float, seed: int) -> None:
    line = fit_line(steps(slope, intercept, 300, seed))
    for position in (0, 150, 300, 600):
        assert line.at(position) == pytest.approx(intercept + slope * position, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 2000), st.floats(1e-4, 10.0)), min_size=1, max_size=60))
def test_no_coefficient_of_a_line_is_ever_negative(measured: list[tuple[int, float]]) -> None:
    line = fit_line(measured)
    assert line.intercept >= 0.0
    assert line.slope >= 0.0
    assert line.at(5000) >= line.at(0)


def test_a_line_needs_steps_and_goes_through_the_origin_rather_than_below() -> None:
    with pytest.raises(ValueError, match="needs steps"):
        fit_line([])
    rising = [(10 + i, 0.03 * i + 0.01) for i in range(3 * WINDOW)]
    falling = [(position, 1.0 - seconds) for position, seconds in rising]
    assert fit_line(rising) == Line(0.0, pytest.approx(0.02, rel=0.1))
    assert fit_line(falling) == Line(pytest.approx(1.0 - 0.445), 0.0)


def test_decode_time_follows_a_machine_that_becomes_slower_and_quicker() -> None:
    time = DecodeTime()
    for position in range(100):
        time.add(position, 0.05 + 1e-4 * position)
    for position in range(100, 120):
        time.add(position, 3 * (0.05 + 1e-4 * position))
    assert time.at(120) == pytest.approx(3 * 0.062, rel=0.05)
    for position in range(120, 140):
        time.add(position, 0.5 * (0.05 + 1e-4 * position))
    assert time.at(140) == pytest.approx(0.5 * 0.064, rel=0.1)


def test_two_stalls_do_not_change_the_decode_time() -> None:
    time = DecodeTime()
    for position in range(60):
        time.add(position, 0.05)
    before = time.at(60)
    time.add(60, 2.0)
    time.add(61, 2.0)
    assert time.at(62) == pytest.approx(before, rel=1e-6)


def test_a_jump_to_another_position_is_followed_soon() -> None:
    time = DecodeTime()
    for position in range(1000, 1100):
        time.add(position, 0.05 + 1e-4 * position)
    for position in range(100, 110):
        time.add(position, 0.05 + 1e-4 * position)
    assert time.at(110) == pytest.approx(0.061, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 3000), st.floats(1e-6, 100.0)), max_size=80), st.integers(0, 10_000))
def test_decode_times_are_always_positive(measured: list[tuple[int, float]], position: int) -> None:
    time = DecodeTime()
    for each in measured:
        time.add(*each)
    assert time.at(position) > 0.0


@given(st.lists(st.tuples(st.integers(-2, 80), st.floats(1e-4, 1.0)), max_size=60))
def test_more_rows_never_take_less(measured: list[tuple[int, float]]) -> None:
    forward = ForwardTime()
    for rows, seconds in measured:
        forward.add(rows, seconds)
    found = [forward.at(rows) for rows in range(1, 100)]
    assert found[0] > 0.0
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(found))


def test_means_that_fall_with_rows_are_pooled() -> None:
    forward = ForwardTime()
    forward.add(1, 0.06)
    forward.add(2, 0.04)
    assert forward.at(1) == forward.at(2) == pytest.approx(0.05)


@pytest.mark.parametrize("shown", [1, 4, 16])
def test_one_row_is_timed_from_steps_of_any_width(shown: int) -> None:
    """On a machine where each further row costs 1 % of the first: the prior's shape."""
    model = TimingModel()
    for position in range(200, 300):
        one = 0.03 + 1e-4 * position
        model.add(position, shown, one * (1 + 0.01 * (shown - 1)))
    speed = model.speed(300, shown)
    assert speed.decode_s == pytest.approx(0.06, rel=0.1)
    assert speed.forward(shown) == pytest.approx(0.06 * (1 + 0.01 * (shown - 1)), rel=0.1)


def test_a_model_without_valid_measurements_has_the_speed_of_the_prior() -> None:
    model = TimingModel()
    model.add(10, 0, 1.0)
    model.add(10, 1, 0.0)
    model.add(10, 1000, 5.0)
    assert model.speed(10, 8) == DecodeSpeed(pytest.approx(PRIOR.decode_s), pytest.approx(PRIOR.row_s))
