"""The placement at a rejection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.baselines.dragon import token_seconds
from paceline.core.side import SIDES, Side, other
from paceline.strategies.aggregate.state import DeciderPlacement, lasting_seconds

seconds = st.floats(0.001, 10.0)
delays = st.floats(0.0, 10.0)
rates = st.floats(0.0, 1.0)


def placed(
    holder: Side = "device", *, cloud: float = 0.06, device: float = 0.06, trip: float = 0.3
) -> DeciderPlacement:
    placement = DeciderPlacement(holder)
    placement.decode["cloud"] = cloud
    placement.decode["device"] = device
    placement.round_trip = trip
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
    placement.holder = "cloud"
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
    placement = DeciderPlacement("cloud", fixed="device")
    assert placement.holder == "device"
    placement.decode["cloud"] = 0.06
    placement.decode["device"] = 0.06
    placement.round_trip = 0.3
    placement.observe_target({"cloud": False, "device": True})
    assert placement.choose(50, ready=True) == "device"


def test_nothing_moves_while_a_speed_or_the_round_trip_is_unknown() -> None:
    placement = DeciderPlacement("device")
    placement.observe_target({"cloud": False, "device": True})
    placement.decode["cloud"] = 0.06
    placement.round_trip = 1.0
    assert placement.choose(20, ready=True) == "device"
    placement.decode["device"] = 0.06
    assert placement.choose(20, ready=True) == "cloud"
