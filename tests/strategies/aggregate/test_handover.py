"""Hand-over of the decision, by a machine played by hand."""

from __future__ import annotations

import pytest

from paceline.core.clock import FIRST_S
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import SIDES, Received, Side
from paceline.wire.messages import Handover, SpeedReport
from tests.strategies.cases import (
    CHAIN,
    TREE,
    Hand,
    cloud,
    decided,
    device,
    handed,
    has,
    heard,
    passed_over_after,
)

# ---- the side that decides ------------------------------------------------------------------------------------------
EQUAL = SpeedReport(0, 0, 0.04, 0.0)  # no forward takes time here, so the own speed is the one assumed at first


def opened(side: Side, **changes: object) -> Hand:
    """A side of an open answer with a peer far away."""
    hand = Hand(Aggregate, side, front=True, private=False, rtt=0.5, max_tokens=100, drafting=CHAIN, **changes)
    hand.begin()
    return hand


@pytest.mark.parametrize("reason", ["private", "wide", "tree", "accepted", "near", "unknown"])
def test_the_decision_stays_where_privacy_or_speed_wants_it(reason: str) -> None:
    hand = device(
        private=reason == "private",
        needs_dists=reason == "wide",
        rtt={"near": 0.0, "unknown": None}.get(reason, 0.5),
        max_tokens=100,
        drafting=TREE if reason == "tree" else CHAIN,
    )
    hand.begin()
    drafts = [65 if reason == "accepted" else 70]
    hand.on(Received(EQUAL), *heard(0, *drafts, log_weight=-5.0))
    hand.answer()
    assert not any(isinstance(message, Handover) for message in hand.sent)


@pytest.mark.parametrize("turn", [0, 2, 3, 2**31 - 1])
@pytest.mark.parametrize("side", SIDES)
def test_a_hand_over_that_is_not_the_peers_to_make_is_ignored(side: Side, turn: int) -> None:
    hand = opened(side)
    hand.on(handed(turn, 0), *heard(0, 65, log_weight=9.0))
    hand.answer()
    assert hand.tokens == ([65] if side == "device" else [])
    hand.on(decided(len(hand.tokens), 70))
    assert hand.tokens == ([65] if side == "device" else [70])


def test_no_peer_makes_a_cloud_decide_what_is_private() -> None:
    hand = cloud(private=True, aggregator="mixture")
    hand.begin()
    hand.on(handed(1, 0), *heard(0, 65))
    hand.answer()
    assert not hand.emitted


def test_a_hand_over_to_nowhere_is_a_peer_that_is_stuck() -> None:
    hand = opened("cloud")
    hand.on(handed(1, 10**6))
    assert passed_over_after(hand, lambda: hand.on(has(0, turn=1))) <= FIRST_S + 1.0
    hand.answer()
    assert len(hand.tokens) == 100
