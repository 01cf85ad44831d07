"""Clocks: what steps of an engine take, and what messages on a link do."""

from __future__ import annotations

import itertools
import math
import random
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import (
    LONGEST_TRIP_S,
    MAX_PINGS,
    MAX_RANKS,
    PRIOR,
    QUEUED_S,
    RECENT,
    AcceptanceByRank,
    DecodeSpeed,
    LinkClock,
    Ratio,
    StepClock,
    row_class,
)
from paceline.core.drafting.ngram_drafter import margin_class

FLAT = DecodeSpeed(1.0)
STEPS = st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 10.0)), min_size=1, max_size=60)


def seen(*steps: tuple[int, float], times: int = RECENT, prior: DecodeSpeed = FLAT) -> StepClock:
    clock = StepClock(prior)
    for rows, seconds in steps * times:
        clock.add(rows, seconds)
    return clock


@given(STEPS, st.sampled_from((None, 20)))
def test_more_rows_never_take_less_and_all_take_some_time(
    steps: list[tuple[int, float]], remembers: int | None
) -> None:
    clock = StepClock(remembers=remembers)
    for rows, seconds in steps:
        clock.add(rows, seconds)
    found = [clock.at(rows) for rows in range(1, 700)]
    assert all(0.0 < before <= after * (1 + 1e-9) for before, after in itertools.pairwise(found))


@given(STEPS, st.floats(1e-4, 0.1), st.floats(0.0, 0.01), st.lists(st.integers(1, 600), min_size=1, max_size=5))
def test_a_constant_truth_is_found_whatever_was_measured_before(
    steps: list[tuple[int, float]], base: float, row: float, sizes: list[int]
) -> None:
    clock = StepClock()
    for rows, seconds in steps:
        clock.add(rows, seconds)
    sizes += [rows for rows, _ in steps]
    for rows in sizes * RECENT:
        clock.add(rows, base + row * rows)
    for rows in sizes:
        assert clock.at(rows) == pytest.approx(base + row * rows, rel=0.15), "classes are an eighth apart"
        assert clock.near(rows) == pytest.approx(base + row * rows, rel=0.15)


def test_a_number_of_rows_has_its_own_time_before_a_nearer_one_s() -> None:
    clock = StepClock()
    for rows, seconds in ((136, 1.125), (158, 1.297)) * RECENT:
        clock.add(rows, seconds)
    assert clock.near(136) == 1.125


@given(st.integers(1, 200), st.floats(1e-6, 100.0), st.integers(3, RECENT))
def test_one_outlier_changes_nothing(rows: int, outlier: float, times: int) -> None:
    clock = seen((rows, 0.1), times=times)
    clock.add(rows, outlier)
    assert clock.at(rows) == pytest.approx(0.1) and clock.near(rows) == pytest.approx(0.1)


def test_stalls_and_noise_change_little() -> None:
    draw, clock = Random(3), StepClock(FLAT)
    for _ in range(400):
        rows = draw.choice((1, 8, 64))
        clock.add(rows, (0.01 + 0.001 * rows) * draw.uniform(0.95, 1.05) * (5.0 if draw.random() < 0.1 else 1.0))
    for rows in (1, 8, 64):
        assert clock.at(rows) == pytest.approx(0.01 + 0.001 * rows, rel=0.05)


def test_times_between_and_beyond_what_was_seen_are_on_lines() -> None:
    clock = seen((2, 0.1), (8, 0.1), (16, 0.3))
    assert [clock.at(rows) for rows in (2, 5, 8, 12, 16)] == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.3])
    assert clock.at(30) == pytest.approx(0.5) and clock.at(1) == pytest.approx(0.1 - 0.2 / 14)
    assert clock.most_rows == 16
    assert seen((8, 0.8), (16, 1.6)).at(1) == pytest.approx(0.1), "rows that are priced alone cost in proportion"


def test_of_one_size_others_have_the_shape_of_the_prior() -> None:
    assert StepClock().at(8) == PRIOR.forward(8) and StepClock().speed().decode_s == PRIOR.decode_s
    assert seen((64, 1.0)).at(16) == seen((64, 1.0)).at(128) == 1.0
    speed = seen((16, 0.03 * 1.15), prior=PRIOR).speed()
    assert speed.decode_s == pytest.approx(0.03) and speed.forward(16) == pytest.approx(0.03 * 1.15)


def test_what_is_no_step_is_not_recorded() -> None:
    clock = StepClock(max_rows=64)
    for rows, seconds in ((0, 1.0), (1, 0.0), (65, 5.0)):
        clock.add(rows, seconds)
    assert not clock and clock.most_rows == 0 and clock.near(1) is None and not clock.knows(64)


def test_a_size_is_forgotten_the_sooner_the_less_it_was_seen() -> None:
    clock = StepClock(FLAT, remembers=90)
    clock.add(100, 9.0)
    for _ in range(RECENT):
        clock.add(8, 1.0)
    assert clock.at(100) == 9.0
    for _ in range(2):
        clock.add(4, 1.0)
    assert clock.at(100) == 1.0 and clock.near(100) is None and clock.most_rows == 8
    for _ in range(90):
        clock.add(4, 1.0)
    assert clock.most_rows == 4 and clock.knows(2) and not clock.knows(1)


@given(st.integers(1, 400))
def test_a_class_has_rows_alike_and_is_near_them(rows: int) -> None:
    assert row_class(rows) <= rows < max(row_class(rows) * 1.125, rows + 1)
    assert row_class(row_class(rows)) == row_class(rows)
    assert (seen((rows, 1.0)).near(int(rows * 1.15)) is not None) and seen((rows, 1.0)).near(2 * rows) is None


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), max_size=40), st.floats(0.1, 3.0))
def test_a_ratio_is_within_its_bounds_and_reaches_a_constant_truth(
    values: list[tuple[float, float]], truth: float
) -> None:
    ratio = Ratio(0.75, strength=2.0, memory=0.9, least=0.1, most=4.0)
    assert ratio.value == 0.75
    for expected, came in values:
        ratio.add(expected, came)
        assert 0.1 <= ratio.value <= 4.0
    for _ in range(200):
        ratio.add(1.0, truth)
    assert ratio.value == pytest.approx(truth, abs=0.2 * abs(truth - 0.75) + 1e-6), "beside a prior that stays"


def test_a_ratio_holds_its_prior_until_enough_is_known() -> None:
    ratio = Ratio(first=3)
    for _ in range(2):
        ratio.add(1.0, 0.5)
    assert ratio.value == 1.0
    ratio.add(1.0, 0.5)
    assert ratio.value == 0.5 and Ratio().value == 1.0


# ---- the bandwidth estimate against a simulated link ----------------------------------------------------------------
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


def test_round_trips_that_vary_are_not_taken_for_a_queue() -> None:
    link, now, rng = LinkClock(), 0.0, random.Random(1)
    told = 0
    for number in range(400):
        now += 2.0
        if number > 20 and number % 2:  # few bytes, now and then
            link.sent(20, now)
        link.pinged(now)
        link.answered(now, now + 0.3 + rng.uniform(0.0, 0.6))
        told += link.rate is not None
    assert told <= 4


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


# ---- acceptance by rank and margin class, over a prior --------------------------------------------------------------
CLASSES = range(margin_class(math.inf) + 1)


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.none() | st.integers(0, 70)), max_size=200))
def test_the_rates_of_a_class_sum_to_at_most_one(seen: list[tuple[int, int | None]]) -> None:
    table = AcceptanceByRank()
    for group, rank in seen:
        table.add(group, rank)
    for group in CLASSES:
        probs = table.probs(group)
        assert len(probs) == MAX_RANKS
        assert all(prob > 0.0 for prob in probs) and sum(probs) < 1.0 + 1e-12


@pytest.mark.parametrize("rank", [0, 1, MAX_RANKS - 1, MAX_RANKS, None])
def test_rates_approach_the_observations_of_their_class_only(rank: int | None) -> None:
    table, fresh = AcceptanceByRank(), AcceptanceByRank()
    for _ in range(300):
        table.add(1, rank)
    probs = table.probs(1)
    if rank is not None and rank < MAX_RANKS:
        assert probs[rank] > 0.85
    else:
        assert sum(probs) < 0.15
    for group in CLASSES:
        if group != 1:
            assert table.probs(group) == fresh.probs(group)


def test_old_observations_decay() -> None:
    table = AcceptanceByRank()
    for rank in [0] * 500 + [1] * 200:
        table.add(0, rank)
    assert table.probs(0)[1] > 0.85


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=MAX_PINGS))
def test_no_peer_draws_a_round_trip_out_by_answering_late(trips: list[float]) -> None:
    """Answers wait for it by that much longer."""
    link = LinkClock()
    for number, trip in enumerate(trips):
        link.pinged(float(number))
        link.answered(float(number), number + trip)
        assert link.rtt is not None and 0.0 <= link.rtt <= LONGEST_TRIP_S * (1 + 1e-9)
