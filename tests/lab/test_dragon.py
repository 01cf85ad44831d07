"""DRAGON's model of the time per token against the paper's other equations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.baselines.dragon import (
    DraftStart,
    Speeds,
    expected_token_time,
    remaining,
    speed_up,
    synchronous_seconds,
    token_seconds,
    waiting,
)
from paceline.core.side import Side

seconds = st.floats(0.001, 10.0)
delays = st.floats(0.0, 10.0)
rates = st.floats(0.0, 1.0)


def equation_8(here: float, there: float, round_trip: float, accepted_here: float, accepted_there: float) -> float:
    """The oracle: Delta Z as the paper prints it."""
    difference = there - here
    if here <= there - round_trip:
        return (1 - accepted_there) * round_trip
    if here <= there:
        return (1 - accepted_here) * difference + (accepted_here - accepted_there) * round_trip
    if here <= there + round_trip:
        return (1 - accepted_there) * difference + (accepted_here - accepted_there) * round_trip
    return (accepted_here - 1) * round_trip


@given(seconds, seconds, delays, rates, rates)
def test_the_difference_of_both_sides_is_equation_8(
    here: float, there: float, round_trip: float, accepted_here: float, accepted_there: float
) -> None:
    decode: dict[Side, float] = {"device": here, "cloud": there}
    found = expected_token_time(decode, round_trip, {"device": accepted_here, "cloud": accepted_there})
    expected = equation_8(here, there, round_trip, accepted_here, accepted_there)
    assert found.gain("device") == -found.gain("cloud") == pytest.approx(expected, abs=1e-9)


@given(seconds, seconds, st.floats(0.001, 10.0), rates)
def test_the_speed_up_is_equation_9(here: float, there: float, round_trip: float, accepted: float) -> None:
    if here <= there:
        inverse = 1 - accepted / (1 + there / round_trip)
    elif here <= there + round_trip:
        inverse = 1 - (1 - here / (there + round_trip)) * accepted
    else:
        inverse = 1.0
    assert 1.0 / speed_up(here, there, round_trip, accepted) == pytest.approx(inverse, abs=1e-9)


def test_without_decode_times_there_is_no_speed_up() -> None:
    with pytest.raises(ValueError, match="takes time"):
        speed_up(0.0, 0.0, 1.0, 0.5)


def test_figure_4_takes_2_seconds_at_best_and_4_point_3_at_worst() -> None:
    speeds = Speeds(decode_here=2.0, decode_there=1.0, delay_here=1.5, delay_there=1.8)
    assert token_seconds(2.0, 1.0, speeds.round_trip, 1.0) == 2.0
    assert token_seconds(2.0, 1.0, speeds.round_trip, 0.0) == pytest.approx(4.3)
    assert synchronous_seconds(2.0, 1.0, speeds.round_trip) == pytest.approx(4.3)
    now = DraftStart(here=9.0, there=9.0, now=9.0)
    assert waiting(speeds, now, accepted_here=False, accepted_there=False) == pytest.approx(4.3)
    assert waiting(speeds, now, accepted_here=True, accepted_there=True) == pytest.approx(2.8)


@pytest.mark.parametrize(
    ("accepted_here", "accepted_there", "expected"),
    [
        (False, True, max(2.0, 1.0 + 1.8 - 0.7)),
        (True, False, max(2.0 - 1.5, 1.5 + 1.0 + 1.8)),
        (True, True, max(2.0 - 1.5, 1.0 + 1.8 - 0.7)),
        (False, False, max(2.0, 1.5 + 1.8 + 1.0)),
    ],
)
def test_the_wait_after_each_verdict_is_table_1(accepted_here: bool, accepted_there: bool, expected: float) -> None:
    speeds = Speeds(decode_here=2.0, decode_there=1.0, delay_here=1.5, delay_there=1.8)
    draft_start = DraftStart(here=10.0 - 1.5, there=10.0 - 0.7, now=10.0)
    assert waiting(speeds, draft_start, accepted_here, accepted_there) == pytest.approx(expected)


def test_overdue_work_takes_no_more_time() -> None:
    assert remaining(1.0, 2.0, 2.25) == 0.75
    assert remaining(1.0, 2.0, 5.0) == 0.0


@given(seconds, seconds, seconds, seconds)
def test_the_expected_wait_is_table_1_of_steps_that_just_began(
    here: float, there: float, delay_here: float, delay_there: float
) -> None:
    """Accepted drafts of the other side arrive without a break: their delay is in the past."""
    speeds, draft_start = (
        Speeds(here, there, delay_here, delay_there),
        DraftStart(here=0.0, there=-delay_there, now=0.0),
    )
    for accepted in (False, True):
        found = waiting(speeds, draft_start, accepted_here=True, accepted_there=accepted)
        assert found == pytest.approx(token_seconds(here, there, speeds.round_trip, float(accepted)))
