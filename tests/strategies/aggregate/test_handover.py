"""Hand-over of the decision, by a machine played by hand."""

from __future__ import annotations

import pytest

from paceline.core.estimation import FIRST_S
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import SIDES, Received, Side
from paceline.wire.messages import Drafts, Handover, SpeedReport, SyncState, Targets
from tests.strategies.cases import (
    CHAIN,
    TREE,
    Hand,
    cloud,
    decided,
    device,
    drafted,
    handed,
    has,
    heard,
    passed_over_after,
    says,
)

EVERY_FRONT = pytest.mark.parametrize("front", SIDES)


# ---- the side that decides ------------------------------------------------------------------------------------------
EQUAL = SpeedReport(0, 0, 0.04, 0.0)  # no forward takes time here, so the own speed is the one assumed at first


def opened(side: Side, **changes: object) -> Hand:
    """A side of an open answer with a peer far away."""
    hand = Hand(Aggregate, side, front=True, private=False, rtt=0.5, max_tokens=100, drafting=CHAIN, **changes)
    hand.begin()
    return hand


def test_the_decision_follows_a_rejection_to_the_other_side() -> None:
    hand = opened("device")
    hand.on(Received(EQUAL))
    effects = hand.on(*heard(0, 70, log_weight=-5.0))
    (handover,) = [message for message in says(effects) if isinstance(message, Handover)]
    assert (handover.turn, handover.start) == (1, 1)
    kinds = [type(message) for message in says(effects)]
    assert kinds.index(Targets) < kinds.index(Handover)
    hand.answer()
    assert any(isinstance(message, Drafts) for message in hand.sent)  # it sends what the other side needs
    hand.on(*heard(1, 65, log_weight=5.0))
    assert hand.tokens == [65]  # and decides no more
    hand.on(decided(1, 70))
    assert hand.tokens == [65, 70]


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


def test_the_side_that_takes_over_decides_from_there_and_gives_it_back() -> None:
    hand = opened("cloud")
    hand.on(Received(EQUAL), *heard(0, 70, 71, log_weight=-9.0), handed(1, 2))
    assert not hand.emitted  # the first two are the other side's to decide
    hand.on(decided(0, 70), decided(1, 71), drafted(2, 65, 65, 72))
    hand.answer()
    assert hand.tokens == [70, 71, 65, 65, 65]
    targets = [message for message in hand.sent if isinstance(message, Targets)]
    assert (targets[0].start, sum(len(message.tokens) for message in targets)) == (2, 3)
    (handover,) = [message for message in hand.sent if isinstance(message, Handover)]
    assert (handover.turn, handover.start) == (2, 5)
    hand.on(drafted(5, 72))
    hand.answer()
    assert len(hand.tokens) == 5
    hand.on(decided(5, 73))
    assert hand.tokens[5:] == [73]


def test_targets_of_the_side_that_decided_before_count_up_to_the_hand_over_only() -> None:
    hand = opened("cloud")
    hand.on(decided(0, 65), handed(1, 1), decided(1, 70, 70))
    assert hand.tokens == [65]


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


def test_a_hand_over_that_was_lost_is_sent_again() -> None:
    hand = opened("device")
    hand.on(Received(EQUAL), *heard(0, 70, log_weight=-5.0))
    again = says(hand.on(has(1, turn=0)))
    assert Handover(0, 0, 1, 1) in again
    behind = opened("cloud")
    asked = says(behind.on(has(1, turn=1)))
    assert any(isinstance(message, SyncState) and message.turn == 0 for message in asked)
