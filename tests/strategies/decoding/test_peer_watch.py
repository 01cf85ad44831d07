"""`aggregate` and a peer that is mute, stuck or slow: when the answer goes on without it, and how it comes back."""

from __future__ import annotations

import pytest

from paceline.core.clock import AGAIN_S, FIRST_S, LONGEST_FIRST_S, PACES, SILENCE_S, STALL_S, PeerRecord
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import SIDES, ClosePeer, OpenPeer, PassOver, Side, Started
from paceline.strategies.joint import LISTEN_S
from tests.strategies.cases import (
    TOKEN_BY_TOKEN,
    Hand,
    cloud,
    decided,
    device,
    found,
    has,
    heard,
    passed_over_after,
    weighed,
)

LONG = 4000  # tokens


def left(hand: Hand) -> bool:
    return any(isinstance(effect, PassOver | ClosePeer) for effect in hand.effects)


def paced(hand: Hand, gap: float, times: int) -> None:
    """The peer brings one target every `gap` seconds."""
    start = len(hand.tokens)
    for at in range(start, start + times):
        hand.wake_until(hand.now + gap, lambda at=at: hand.on(has(at)))  # type: ignore[misc]
        event = decided(at, 65)
        hand.on(type(event)(event.message, hand.now))  # type: ignore[union-attr]
        hand.answer()


@pytest.mark.parametrize("gap", [0.05, 0.3, 3.0])
def test_the_silence_that_may_pass_follows_the_pace_of_the_answer(gap: float) -> None:
    hand = cloud(max_tokens=LONG, drafting=TOKEN_BY_TOKEN)
    hand.begin()
    paced(hand, gap, 30)
    hand.silent_since = hand.now
    allowed = max(SILENCE_S, PACES * gap)
    assert 0.9 * allowed <= passed_over_after(hand) <= 1.1 * allowed + LISTEN_S


def test_a_round_trip_is_no_silence() -> None:
    hand = cloud()
    hand.begin()
    hand.wake(rtt=0.6)
    hand.silent_since = hand.now
    assert SILENCE_S + 0.6 < passed_over_after(hand) <= SILENCE_S + 0.6 + LISTEN_S


def test_a_peer_that_says_nothing_yet_on_a_live_link_may_read_a_long_prompt() -> None:
    hand = device(max_tokens=LONG)
    hand.begin()
    hand.wake_until(hand.now + 0.8 * FIRST_S, lambda: hand.on(has(0)))
    assert not left(hand)
    hand.on(*heard(0, 65))
    hand.answer()
    assert hand.tokens == [65]


@pytest.mark.parametrize(("first_s", "waits"), [(FIRST_S, 3.0 * FIRST_S), (AGAIN_S, AGAIN_S)])
def test_a_peer_may_read_its_prompt_for_as_long_again_as_this_side_has_read_its_own_unless_it_has_failed_before(
    first_s: float, waits: float
) -> None:
    hand = cloud(max_tokens=LONG, record=PeerRecord(first_s=first_s))
    hand.on(Started(0.0), found(0.0))
    hand.wake_until(3.0 * FIRST_S, lambda: hand.on(has(0)))
    hand.answer()
    assert waits - 1.0 <= stall(hand) <= waits + 1.0


def test_a_mute_peer_that_nobody_waits_for_is_not_passed_over() -> None:
    """It has found nothing: each target is this side's own."""
    hand = device(max_tokens=LONG, drafting=TOKEN_BY_TOKEN)
    hand.begin(score=1.0)
    hand.on(weighed(None))
    hand.silent_since = hand.now
    hand.wake_until(hand.now + 10.0, hand.answer_one)
    assert len(hand.tokens) > 30 and not left(hand)


def test_this_sides_own_sleep_is_no_silence_of_the_peer() -> None:
    """A suspended front wakes late once; the link counts afresh then."""
    hand = cloud(max_tokens=LONG)
    hand.begin()
    paced(hand, 0.1, 4)
    hand.now += 3600.0
    hand.wake()
    assert not left(hand)


def test_a_peer_that_speaks_at_once_waits_until_the_answer_has_gone_on_and_each_time_for_twice_as_long() -> None:
    hand = cloud(max_tokens=LONG, drafting=TOKEN_BY_TOKEN)
    hand.begin()
    written = []
    for epoch in range(5):
        hand.silent_since, before = hand.now, len(hand.tokens)
        passed_over_after(hand)
        hand.on(has(before, epoch=epoch))
        while not any(isinstance(effect, OpenPeer) and effect.epoch > epoch for effect in hand.effects):
            hand.answer_one()
        written.append(len(hand.tokens) - before)
        hand.silent_since = None
        hand.answer()
    assert written == [1, 2, 4, 8, 16]


# ---- a peer that is stuck -------------------------------------------------------------------------------------------
def stall(hand: Hand, targets: int = 0) -> float:
    """Seconds until a peer that says every second only what it has is passed over."""
    return passed_over_after(hand, lambda: hand.on(has(targets)))


@pytest.mark.parametrize("side", SIDES)
def test_a_peer_that_never_contributes_is_passed_over_late_once_and_soon_in_later_answers(side: Side) -> None:
    record = PeerRecord()
    waits = []
    for _ in range(3):
        hand = Hand(Aggregate, side, front=True, record=record)
        hand.begin()
        waits.append(stall(hand))
        hand.answer()
        assert hand.tokens == [65] * 8
    assert FIRST_S <= waits[0] <= FIRST_S + 1.0
    assert all(AGAIN_S <= wait <= AGAIN_S + 1.0 for wait in waits[1:]), waits


def test_a_peer_that_takes_part_again_may_read_a_long_prompt_again() -> None:
    record = PeerRecord(first_s=AGAIN_S)
    hand = device(record=record, max_tokens=LONG, drafting=TOKEN_BY_TOKEN)
    hand.begin()
    stall(hand)
    hand.wake_until(hand.now + 1.0, lambda: hand.on(has(0)))
    assert record.first_s == AGAIN_S, "to say what it has is no part in the answer"
    hand.on(weighed(0.0))
    assert record.first_s == FIRST_S


@pytest.mark.parametrize("gap", [0.1, 0.5])
def test_a_peer_that_stops_to_contribute_is_passed_over_after_eight_paces(gap: float) -> None:
    hand = cloud(max_tokens=LONG, drafting=TOKEN_BY_TOKEN)
    hand.begin()
    paced(hand, gap, 30)
    allowed = max(STALL_S, PACES * gap)
    assert 0.8 * allowed <= stall(hand, 30) <= 1.2 * allowed + 2 * LISTEN_S


def test_to_say_what_it_has_does_not_bring_a_stuck_peer_back_and_to_contribute_does() -> None:
    hand = cloud(max_tokens=LONG, drafting=TOKEN_BY_TOKEN)
    hand.begin()
    paced(hand, 0.1, 5)
    stall(hand, 5)
    hand.answer_one()
    assert not any(isinstance(effect, OpenPeer) for effect in hand.on(has(5)))
    (again,) = [effect for effect in hand.on(decided(5, 65)) if isinstance(effect, OpenPeer)]
    assert again == OpenPeer(tuple(hand.tokens), 1)


def test_a_slow_search_or_engine_of_its_own_is_not_held_against_the_peer() -> None:
    hand = device()
    hand.on(Started(0.0))
    for event in (has(0), found()):  # while it searches, and while its engine has not answered
        hand.on(event)
        hand.wake_until(hand.now + 2 * LONGEST_FIRST_S, lambda: hand.on(has(0)))
    assert not left(hand)


# ---- an answer that must wait ---------------------------------------------------------------------------------------
def test_a_pausing_answer_waits_for_the_link_and_asks_no_longer_than_a_minute() -> None:
    hand = cloud(awaited=True, max_tokens=LONG)
    hand.begin()
    hand.silent_since = hand.now
    hand.wake_until(hand.now + 0.9 * LONGEST_FIRST_S)
    assert not left(hand), "its link's heartbeat decides"
    hand.wake_until(hand.now + 0.2 * LONGEST_FIRST_S)
    assert any(isinstance(effect, ClosePeer) for effect in hand.effects)
    assert not hand.emitted
