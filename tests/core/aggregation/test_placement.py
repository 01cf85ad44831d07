"""The model of the time per token against the paper's other equations, and the placement at a rejection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.aggregation.placement import (
    DraftStart,
    Placement,
    Speeds,
    expected_token_time,
    lasting_seconds,
    remaining,
    speed_up,
    synchronous_seconds,
    token_seconds,
    waiting,
)
from paceline.core.estimation import DecodeSpeed
from paceline.core.side import SIDES, Side, other

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


def gain(here: float, there: float, round_trip: float, accepted_here: float, accepted_there: float) -> float:
    decode: dict[Side, float] = {"device": here, "cloud": there}
    return expected_token_time(decode, round_trip, {"device": accepted_here, "cloud": accepted_there}).gain("device")


@given(seconds, seconds, delays, rates, rates)
def test_the_difference_of_both_sides_is_equation_8(
    here: float, there: float, round_trip: float, accepted_here: float, accepted_there: float
) -> None:
    found = gain(here, there, round_trip, accepted_here, accepted_there)
    assert found == pytest.approx(equation_8(here, there, round_trip, accepted_here, accepted_there), abs=1e-9)


@given(seconds, st.floats(0.0, 5.0), rates, rates)
def test_the_gain_is_continuous_with_the_stated_values_where_its_cases_meet(
    there: float, round_trip: float, accepted_here: float, accepted_there: float
) -> None:
    corners = {
        there - round_trip: (1 - accepted_there) * round_trip,
        there: (accepted_here - accepted_there) * round_trip,
        there + round_trip: (accepted_here - 1) * round_trip,
    }
    for here, expected in corners.items():
        for near in (here - 1e-9, here, here + 1e-9):
            if near > 0:
                found = gain(near, there, round_trip, accepted_here, accepted_there)
                assert found == pytest.approx(expected, abs=1e-7)


@given(seconds, seconds, delays, rates, rates)
def test_the_gain_of_one_side_is_the_loss_of_the_other(
    here: float, there: float, round_trip: float, accepted_here: float, accepted_there: float
) -> None:
    found = expected_token_time(
        {"cloud": here, "device": there}, round_trip, {"cloud": accepted_here, "device": accepted_there}
    )
    assert found.gain("cloud") == -found.gain("device")


@given(seconds, seconds, st.floats(0.001, 10.0), rates)
def test_drafting_ahead_is_never_slower_than_waiting_for_each_token(
    here: float, there: float, round_trip: float, accepted: float
) -> None:
    assert speed_up(here, there, round_trip, accepted) >= 1.0 - 1e-12


def test_it_is_as_slow_only_if_nothing_is_accepted_or_the_holder_hides_the_round_trip() -> None:
    for here in (0.5, 1.0, 2.0, 3.0, 3.5, 5.0):
        for accepted in (0.0, 0.1, 0.9, 1.0):
            equal = speed_up(here, 1.0, 2.0, accepted) == pytest.approx(1.0, abs=1e-12)
            assert equal == (accepted == 0.0 or here >= 1.0 + 2.0), (here, accepted)


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
    assert speeds.swapped() == Speeds(1.0, 2.0, 1.8, 1.5)


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


# ---- the placement --------------------------------------------------------------------------------------------------
def placed(holder: Side = "device", *, cloud: float = 0.06, device: float = 0.06, trip: float = 0.3) -> Placement:
    placement = Placement(holder)
    placement.observe_speed("cloud", DecodeSpeed(cloud))
    placement.observe_speed("device", DecodeSpeed(device))
    placement.observe_round_trip(trip)
    return placement


@pytest.mark.parametrize("holder", SIDES)
def test_the_decision_follows_a_rejection_to_the_other_side(holder: Side) -> None:
    placement = placed(holder)
    placement.observe_target({holder: True, other(holder): False})
    assert placement.choose(50, ready=True) == other(holder)


@pytest.mark.parametrize("holder", SIDES)
def test_it_stays_where_the_other_sides_draft_was_accepted_or_is_not_known(holder: Side) -> None:
    placement = placed(holder)
    for accepted in ({holder: False, other(holder): True}, {holder: False}, {}):
        placement.observe_target(accepted)
        assert placement.choose(50, ready=False) == holder


def test_it_stays_with_a_side_whose_drafting_hides_the_round_trip() -> None:
    placement = placed(cloud=0.006, device=0.2, trip=0.1)
    placement.observe_target({"cloud": False, "device": True})
    assert placement.choose(50, ready=False) == "device"


def test_it_goes_to_a_slow_side_for_good_and_does_not_come_back() -> None:
    placement = placed(cloud=0.2, device=0.006, trip=0.1)
    placement.observe_target({"cloud": False, "device": True})
    assert placement.choose(50, ready=True) == "cloud"
    placement.moved("cloud")
    placement.observe_target({"cloud": True, "device": False})
    assert placement.choose(50, ready=False) == "cloud"


def test_a_move_that_costs_in_the_long_run_is_made_for_the_last_targets_only() -> None:
    """Their number bounds the loss; a move now saves a one-way delay in any case."""
    placement = placed(cloud=0.02, device=0.1, trip=0.06)
    for _ in range(100):
        placement.observe_target({"cloud": True, "device": True})
    placement.observe_target({"cloud": False, "device": True})
    chosen = [placement.choose(left, ready=True) for left in (0, 1, 5, 50)]
    assert chosen == sorted(chosen), "the cloud first, if ever"


@given(seconds, seconds, delays, rates)
def test_the_option_to_move_makes_no_place_slower(here: float, there: float, round_trip: float, rate: float) -> None:
    lasting = lasting_seconds(here, there, round_trip, rate)
    assert max(here, there) - 1e-12 <= lasting <= token_seconds(here, there, round_trip, rate) + 1e-12


def test_a_side_fixed_by_privacy_keeps_the_aggregator() -> None:
    placement = Placement("cloud", fixed="device")
    assert placement.holder == "device"
    placement.observe_speed("cloud", DecodeSpeed(0.06))
    placement.observe_speed("device", DecodeSpeed(0.06))
    placement.observe_round_trip(0.3)
    placement.observe_target({"cloud": False, "device": True})
    assert placement.choose(50, ready=True) == "device"


def test_nothing_moves_while_a_speed_or_the_round_trip_is_unknown() -> None:
    placement = Placement("device")
    placement.observe_target({"cloud": False, "device": True})
    placement.observe_speed("cloud", DecodeSpeed(0.06))
    placement.observe_round_trip(1.0)
    assert placement.expected_token_time() is None
    assert placement.choose(20, ready=True) == "device"
    placement.observe_speed("device", DecodeSpeed(0.06))
    assert placement.choose(20, ready=True) == "cloud"


def test_wide_steps_count_with_all_their_rows() -> None:
    placement = placed()
    placement.observe_speed("cloud", DecodeSpeed(0.06, 0.02), rows=16)
    expected = placement.expected_token_time()
    assert expected is not None
    assert expected.device >= 0.06 + 15 * 0.02
