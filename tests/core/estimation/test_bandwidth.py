"""The estimate against a link whose rate is known: a queue that is emptied at that rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.estimation.bandwidth import QUEUED_S, Bandwidth


def carried(rate: float, offered: float, delay: float, messages: int, size: int = 2000) -> Bandwidth:
    """`messages` of `size` bytes offered at `offered` bytes a second, a ping after every fourth."""
    link = Bandwidth()
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
        return  # a queue that long takes long to build
    assert carried(rate, rate * excess, delay, messages).rate == pytest.approx(rate, rel=0.15)


@given(st.floats(1e4, 1e7), st.floats(0.05, 0.6), st.floats(0.1, 0.3))
def test_a_link_with_room_shows_no_limit(rate: float, share: float, delay: float) -> None:
    own = 2000 / rate  # what a message itself takes is no queue
    assert carried(rate, rate * share, delay, 100).rate is None or own > QUEUED_S


def test_a_queue_that_is_gone_is_forgotten() -> None:
    link = carried(1e5, 4e5, 0.05, 200)
    assert link.rate is not None
    for now in (1000.0, 1003.0):
        link.pinged(now)
        link.answered(now, now + 0.2)  # the route has become longer, too
    assert link.rate is None


def test_answers_nobody_asked_for_measure_nothing_and_pings_are_not_hoarded() -> None:
    link = Bandwidth()
    link.answered(3.0, 4.0)
    for ping in range(10_000):
        link.pinged(float(ping))
    assert link.rate is None and len(link._pings) < 100
