"""The bandwidth estimate against a simulated link: a queue that drains at a known rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import QUEUED_S, LinkClock


def simulated(rate: float, offered: float, delay: float, messages: int, size: int = 2000) -> LinkClock:
    """Send `messages` of `size` bytes at `offered` bytes per second, with a ping after every fourth."""
    link = LinkClock()
    free_at, answers = 0.0, []
    link.pinged(0.0)
    answers.append((0.0, delay))
    for number in range(1, messages + 1):
        now = number * size / offered
        link.sent(size)
        free_at = max(free_at, now) + size / rate
        if number % 4 == 0:
            for sent_at, back in [answer for answer in answers if answer[1] <= now]:
                link.answered(sent_at, back)
            answers = [answer for answer in answers if answer[1] > now]
            link.pinged(now)
            answers.append((now, free_at + delay))
    for sent_at, back in answers:
        link.answered(sent_at, back)
    return link


@given(st.floats(1e4, 1e7), st.floats(1.5, 8.0), st.floats(0.001, 0.3))
def test_a_full_link_shows_its_rate(rate: float, excess: float, delay: float) -> None:
    queued = 4 * (delay + 0.05) * rate * excess / (excess - 1.0)
    messages = max(200, round(max(queued, 8 * delay * rate * excess) / 2000))  # and over several round trips
    if messages > 5000:
        return  # such a queue takes too long to build up
    assert simulated(rate, rate * excess, delay, messages).rate == pytest.approx(rate, rel=0.15)


@given(st.floats(1e4, 1e7), st.floats(0.05, 0.6), st.floats(0.1, 0.3))
def test_a_link_that_is_not_full_has_no_estimate(rate: float, share: float, delay: float) -> None:
    own = 2000 / rate  # the time of a message itself is not queueing
    assert simulated(rate, rate * share, delay, 100).rate is None or own > QUEUED_S


def test_the_estimate_ends_with_the_queue() -> None:
    link = simulated(1e5, 4e5, 0.05, 200)
    assert link.rate is not None
    for now in (1000.0, 1003.0):
        link.pinged(now)
        link.answered(now, now + 0.2)  # the route has become longer too
    assert link.rate is None


def test_answers_without_a_ping_are_ignored_and_unanswered_pings_are_bounded() -> None:
    link = LinkClock()
    link.answered(3.0, 4.0)
    for ping in range(10_000):
        link.pinged(float(ping))
    assert link.rate is None and len(link._pings) < 100


@given(st.floats(1e4, 1e6), st.floats(0.001, 0.1), st.floats(0.1, 5.0))
def test_pauses_of_the_sender_are_not_taken_for_slowness_of_the_link(rate: float, delay: float, pause: float) -> None:
    link, now, size = LinkClock(), 0.0, round(rate * 0.3)
    link.pinged(now)
    link.answered(now, now + delay)
    for _ in range(20):
        now += delay + pause
        link.sent(size, now)
        link.pinged(now)
        link.answered(now, now + size / rate + delay)
        now += size / rate
    assert link.rate == pytest.approx(rate, rel=0.02)


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(-1.0, 20.0)), max_size=30), st.floats(0.0, 1.0))
def test_a_round_trip_is_never_negative_and_reaches_a_constant_truth(
    trips: list[tuple[float, float]], truth: float
) -> None:
    link, now = LinkClock(), 0.0
    for trip, held in [*trips, *[(truth + 0.5, 0.5)] * 200]:
        link.pinged(now)
        link.answered(now, now + trip, held)
        now += trip + 1.0
        assert link.rtt is not None and link.rtt >= 0.0
    assert link.rtt == pytest.approx(truth, abs=1e-6)
