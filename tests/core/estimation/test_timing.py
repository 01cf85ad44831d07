"""Timing estimates: lines from noisy steps, monotone forward times, delays without a common clock, acceptance."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.estimation import (
    FITTED,
    PRIOR,
    WINDOW,
    AcceptanceRate,
    DecodeSpeed,
    DecodeTime,
    Delays,
    ForwardTime,
    Line,
    TimingModel,
    fit_line,
    inliers,
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


def test_with_outliers_the_line_would_be_far_off() -> None:
    noisy = steps(1e-4, 0.05, 300, seed=1)
    x, y = np.array(noisy).T
    slope, intercept = np.polyfit(x, y, 1)
    assert abs(intercept + slope * 150 - 0.065) > 2 * abs(fit_line(noisy).at(150) - 0.065)


def test_inliers_are_near_the_mean_of_their_window() -> None:
    assert inliers([1.0] * 9 + [5.0]) == list(range(9))
    assert inliers([2.0] * 25) == list(range(25))
    assert inliers([1.0] * 10 + [3.0] * 9 + [30.0]) == [*range(10), *range(10, 19)]
    assert inliers([]) == []


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


def test_decode_time_is_the_prior_then_a_median_then_a_line() -> None:
    time = DecodeTime(prior=0.5)
    assert time.at(100) == 0.5
    for position in range(3):
        time.add(position, 0.1)
    assert time.at(1000) == pytest.approx(0.1)
    for position in range(3, 2 * FITTED):
        time.add(position, 0.1 + 1e-3 * position)
    assert time.at(2 * FITTED) == pytest.approx(0.1 + 2e-3 * FITTED, rel=0.05)


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


def test_forward_times_are_the_prior_until_measured_then_the_means_and_lines_between() -> None:
    forward = ForwardTime(prior=DecodeSpeed(0.1, 0.001))
    assert forward.at(16) == pytest.approx(0.115)
    for _ in range(20):
        forward.add(1, 0.05)
        forward.add(16, 0.08)
    assert forward.at(1) == pytest.approx(0.05)
    assert forward.at(16) == pytest.approx(0.08)
    assert forward.at(6) == pytest.approx(0.06)
    assert forward.at(31) == pytest.approx(0.08 * 0.13 / 0.115)  # the prior's shape beyond
    assert forward.speed(16) == DecodeSpeed(pytest.approx(0.05), pytest.approx(0.002))
    forward.add(512, 9.0)  # a prefill
    assert forward.at(100) < 0.2


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


@given(st.lists(st.booleans(), max_size=50))
def test_acceptance_without_a_prior_is_the_mean_so_far(accepted: list[bool]) -> None:
    rate = AcceptanceRate(prior=0.3, memory=1.0, strength=0.0)
    for each in accepted:
        rate.add(each)
    assert rate.value == pytest.approx(np.mean(accepted) if accepted else 0.3)


def test_acceptance_begins_at_its_prior_and_decays() -> None:
    rate = AcceptanceRate(prior=0.75, strength=4.0, memory=0.98)
    assert rate.value == 0.75
    rate.add(False)
    assert 0.55 < rate.value < 0.65
    for _ in range(400):
        rate.add(True)
    assert rate.value > 0.99
    for _ in range(400):
        rate.add(False)
    assert rate.value < 0.01


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 0.1)), max_size=30))
def test_delays_need_no_common_clock(offset: float, noise: list[tuple[float, float, float]]) -> None:
    delays, now = Delays(weight=1.0), 0.0
    delays.add(now, now + offset + 0.05, now + offset + 0.05, now + 0.1)  # as fast as the link can
    for more_out, more_back, busy in noise:
        now += 1.0
        received = now + offset + 0.05 + more_out
        back = now + 0.05 + more_out + busy + 0.05 + more_back
        delays.add(now, received, received + busy, back)
        assert delays.round_trip == pytest.approx(0.1 + more_out + more_back, abs=1e-6)
        assert delays.out == pytest.approx(0.05 + more_out, abs=1e-6)
        assert delays.back == pytest.approx(0.05 + more_back, abs=1e-6)


def test_delays_are_unknown_at_first_and_impossible_exchanges_are_ignored() -> None:
    delays = Delays()
    delays.add(1.0, 5.0, 4.0, 2.0)  # answered before it was received
    delays.add(1.0, 5.0, 9.0, 2.0)  # took less time here than there
    assert (delays.round_trip, delays.out, delays.back) == (None, None, None)
    delays.add(1.0, 105.0, 105.5, 1.7)
    assert delays.round_trip == pytest.approx(0.2)
    assert delays.out == pytest.approx(0.1)
