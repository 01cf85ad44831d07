"""The model of the time per token against the paper's other equations, and the placement with hysteresis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.aggregation.placement import (
    MARGIN,
    MIN_DWELL,
    DraftStart,
    Placement,
    Speeds,
    expected_token_time,
    remaining,
    speed_up,
    synchronous_seconds,
    token_seconds,
    waiting,
)
from paceline.core.estimation.timing import AcceptanceRate, DecodeSpeed
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
def placed(holder: Side = "device", **settings: float) -> Placement:
    """Equal speeds and a long link: the aggregator belongs beside the drafts that are rejected more often."""
    placement = Placement(
        holder,
        margin=settings.get("margin", MARGIN),
        min_dwell=int(settings.get("min_dwell", MIN_DWELL)),
        acceptance={side: AcceptanceRate(memory=settings.get("memory", 0.9), strength=0.0) for side in SIDES},
    )
    placement.observe_speed("cloud", DecodeSpeed(0.06))
    placement.observe_speed("device", DecodeSpeed(0.06))
    placement.observe_round_trip(0.3)
    return placement


def follow(placement: Placement, accepted: Sequence[tuple[bool, bool]], position: int = 0) -> list[int]:
    """Positions of hand-overs while these (cloud, device) verdicts come."""
    moves = []
    for i, (cloud, device) in enumerate(accepted, position + 1):
        placement.observe_target({"cloud": cloud, "device": device})
        if (chosen := placement.choose(i)) != placement.holder:
            placement.moved(chosen, i)
            moves.append(i)
    return moves


def test_the_aggregator_follows_a_change_of_acceptance_in_both_directions() -> None:
    placement = placed()
    cloud_wrong, device_wrong = [(False, True)] * 30, [(True, False)] * 30
    assert len(follow(placement, cloud_wrong)) == 1
    assert placement.holder == "cloud"
    assert len(follow(placement, device_wrong, 30)) == 1
    assert placement.holder == "device"
    assert len(follow(placement, cloud_wrong, 60)) == 1
    assert placement.holder == "cloud"


@pytest.mark.parametrize("start", SIDES)
def test_it_goes_to_the_bottleneck_from_either_side(start: Side) -> None:
    placement = placed(start)
    placement.observe_speed("cloud", DecodeSpeed(0.02))
    placement.observe_speed("device", DecodeSpeed(0.9))
    assert len(follow(placement, [(True, False)] * 20)) == (start != "device")
    assert placement.holder == "device"


def test_jitter_of_speeds_and_delays_moves_nothing_where_little_is_to_be_gained() -> None:
    """Both sides are equal up to noise of 1 % in every figure: without hysteresis the aggregator keeps moving."""
    moves = {}
    for name, margin, min_dwell in (("bare", 0.0, 0), ("calm", MARGIN, MIN_DWELL)):
        placement, count = placed(margin=margin, min_dwell=min_dwell, memory=0.98), 0
        for i in range(200):
            noise = 0.01 * math.sin(7.0 * i)
            placement.observe_speed("cloud", DecodeSpeed(0.06 * (1 + noise)))
            placement.observe_speed("device", DecodeSpeed(0.06 * (1 - noise)))
            placement.observe_round_trip(0.3 * (1 + noise))
            placement.observe_target({"cloud": i % 4 > 0, "device": (i + 1) % 4 > 0})
            if (chosen := placement.choose(i)) != placement.holder:
                placement.moved(chosen, i)
                count += 1
        moves[name] = count
    assert moves["bare"] >= 50
    assert moves["calm"] <= 2  # in the first tokens, while the acceptance is only known to be 0.5 or 1


def test_after_a_move_it_stays_for_min_dwell_and_then_may_move_again() -> None:
    placement = placed(min_dwell=8, margin=0.0)
    assert follow(placement, [(False, True)]) == [1]
    assert follow(placement, [(True, False)] * 20, 1) == [9]


def test_a_gain_below_the_margin_moves_nothing() -> None:
    placement = placed(margin=0.5, min_dwell=0)
    for _ in range(50):
        placement.observe_target({"cloud": False, "device": True})
    expected = placement.expected_token_time()
    assert expected is not None
    assert expected.gain("device") > 0.5 * expected.on("device")
    assert placement.choose(50) == "cloud"
    placement.margin = 0.9
    assert placement.choose(50) == "device"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.sampled_from(SIDES), st.integers(1, 20))
def test_two_moves_are_never_closer_than_min_dwell(
    accepted: list[tuple[bool, bool]], start: Side, min_dwell: int
) -> None:
    moves = follow(placed(start, min_dwell=min_dwell, margin=0.0), accepted)
    assert all(later - earlier >= min_dwell for earlier, later in pairwise(moves))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.sampled_from(SIDES))
def test_without_hysteresis_it_is_the_sign_of_the_gain(accepted: list[tuple[bool, bool]], start: Side) -> None:
    placement = placed(start, margin=0.0, min_dwell=0)
    for i, (cloud, device) in enumerate(accepted):
        placement.observe_target({"cloud": cloud, "device": device})
        expected = placement.expected_token_time()
        assert expected is not None
        assert (placement.choose(i) == other(placement.holder)) == (expected.gain(placement.holder) > 0.0)
        placement.moved(placement.choose(i), i)


def test_a_side_fixed_by_privacy_keeps_the_aggregator() -> None:
    placement = Placement("cloud", fixed="device")
    assert placement.holder == "device"
    placement.observe_speed("cloud", DecodeSpeed(9.0))
    placement.observe_speed("device", DecodeSpeed(0.01))
    placement.observe_round_trip(0.3)
    assert follow(placement, [(False, True)] * 40) == []


def test_nothing_moves_while_a_speed_or_the_round_trip_is_unknown() -> None:
    placement = Placement("device")
    assert follow(placement, [(False, True)] * 20) == []
    placement.observe_speed("cloud", DecodeSpeed(9.0))
    placement.observe_round_trip(1.0)
    assert placement.expected_token_time() is None
    assert placement.choose(20) == "device"
    placement.observe_speed("device", DecodeSpeed(0.01))
    assert placement.choose(20) == "cloud"


def test_wide_steps_count_with_all_their_rows() -> None:
    placement = placed()
    placement.observe_speed("cloud", DecodeSpeed(0.06, 0.02), rows=16)
    expected = placement.expected_token_time()
    assert expected is not None
    assert expected.device >= 0.06 + 15 * 0.02
