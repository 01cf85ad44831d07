"""The budget and its guard on engines with known step times: drafts where they pay, next to no cost elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import FIRST_CREDIT, MAX_CREDIT, AdaptiveBudget, BudgetStats, StepGuard

StepTime = Callable[[int], float]  # rows → seconds


def memory_bound(rows: int) -> float:
    """Sixteen rows take a tenth longer than one."""
    return 0.05 + 0.0003 * (rows - 1)


def compute_bound(rows: int) -> float:
    """Each row takes as long as the first."""
    return 0.02 * rows


def play(
    stats: BudgetStats,
    steps: int,
    step_time: StepTime,
    accept: Callable[[int], int],
    *,
    expected: float = 0.5,
    sequences: int = 1,
) -> tuple[float, float, list[int]]:
    """Seconds with the budget, seconds of plain decoding for as many tokens, and the draft tokens of each step.

    All requests of a batch behave alike. accept(drafts): number of accepted draft tokens.
    """
    budgets = [AdaptiveBudget(stats, rows=64) for _ in range(sequences)]
    seconds = plain = 0.0
    drafts = []
    for _ in range(steps):
        probs = [expected * 0.8**i for i in range(min([budget.max_draft_tokens() for budget in budgets]))]
        count = min([budget.choose(probs) for budget in budgets]) if probs else 0
        accepted = min(accept(count), count)
        rows = sequences * (1 + count)
        step = StepSize(rows, sequences)
        for budget in budgets:
            budget.record(count, sum(probs[:count]), accepted, step, step_time(rows))
        seconds += step_time(rows)
        plain += (1 + accepted) * step_time(sequences)
        drafts.append(count)
    return seconds, plain, drafts


@given(
    st.just(0.0) | st.floats(0.0, 1.0),
    st.floats(1e-4, 0.1),
    st.floats(0.0, 1.0),
    st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    st.sampled_from([1, 2, 16]),
    st.integers(0, 1000),
)
def test_never_slower_than_plain_by_more_than_three_hundredths(
    right: float, base: float, slope: float, expected: float, sequences: int, seed: int
) -> None:
    """For any cost of a row and any acceptance rate, independent of the drafter's probabilities."""
    chance = random.Random(seed)

    def accept(count: int) -> int:
        accepted = 0
        while accepted < count and chance.random() < right:
            accepted += 1
        return accepted

    seconds, plain, _ = play(
        BudgetStats(),
        200,
        lambda rows: base * (1.0 + slope * (rows - 1)),
        accept,
        sequences=sequences,
        expected=expected,
    )
    assert plain / seconds >= 0.97


def test_it_drafts_where_rows_are_cheap_and_drafts_are_accepted() -> None:
    seconds, plain, drafts = play(BudgetStats(), 200, memory_bound, lambda count: min(count, 2), expected=0.8)
    assert plain / seconds > 2.0
    assert sum(count > 0 for count in drafts) > 180


def test_drafts_that_pay_for_one_request_do_not_for_sixteen_on_a_busy_engine() -> None:
    def step_time(rows: int) -> float:
        return 0.05 if rows <= 32 else 0.05 * rows / 32

    _, _, alone = play(BudgetStats(), 100, step_time, lambda count: min(count, 1), expected=0.3)
    _, _, together = play(BudgetStats(), 100, step_time, lambda count: min(count, 1), expected=0.3, sequences=16)
    assert sum(alone) > 4 * sum(together)
    assert max(together[50:]) <= 3


def test_a_text_that_becomes_predictable_is_drafted_again() -> None:
    stats = BudgetStats()
    play(stats, 100, memory_bound, lambda _: 0)
    assert stats.calibration.value < 0.1
    _, _, drafts = play(stats, 300, memory_bound, lambda count: min(count, 2))
    assert sum(count > 0 for count in drafts[200:]) > 80


def test_one_request_may_lose_only_part_of_what_another_has_saved() -> None:
    def step_time(rows: int) -> float:
        return 0.04 + 0.005 * rows

    stats = BudgetStats()
    play(stats, 200, step_time, lambda count: min(count, 3), expected=0.9)
    assert stats.guard.credit.credit > 15.0
    seconds, plain, _ = play(stats, 100, step_time, lambda _: 0, expected=0.9)
    assert 0.0 < (seconds - plain) / step_time(1) < 5.0


def test_a_stall_does_not_stop_drafting() -> None:
    stats = BudgetStats()
    play(stats, 50, memory_bound, lambda count: min(count, 2), expected=0.8)
    calls = iter([0] * 4 + [1] + [0] * 1000)

    def stalls(rows: int) -> float:
        return 2.0 if next(calls) else memory_bound(rows)

    _, _, drafts = play(stats, 40, stalls, lambda count: min(count, 2), expected=0.8)
    assert sum(count > 0 for count in drafts) > 35


# ---- the guard, the work for drafts on the host included ------------------------------------------------------------
AwakeTime = Callable[[int, bool], float]  # rows, awake → seconds


def guarded(
    guard: StepGuard,
    step_time: AwakeTime,
    *,
    steps: int = 1000,
    requests: int = 4,
    drafts: int = 0,
    accepted: int = 0,
    others: Callable[[int], int] = lambda _: 0,
) -> tuple[float, int]:
    """Seconds a token, relative to quiet steps alone, and the number of awake steps.

    drafts, accepted: of each request in an awake step. others: rows of other requests, such as prompts, by step.
    """
    seconds = quiet_seconds = 0.0
    tokens = awake_steps = 0
    for number in range(steps):
        awake = guard.awake
        rows = requests * (1 + drafts * awake) + others(number)
        step, taken = StepSize(rows, requests), step_time(rows, awake)
        for _ in range(requests):
            guard.report(step, taken, drafted=drafts * awake, accepted=accepted * awake, awake=awake)
        seconds += taken
        quiet_seconds += step_time(requests + others(number), False)
        tokens += 1 + accepted * awake
        awake_steps += awake
    return seconds / tokens / (quiet_seconds / steps), awake_steps


@pytest.mark.parametrize("work", [0.01, 0.2, 1.0, 4.0])
def test_work_on_the_host_that_yields_nothing_costs_two_hundredths_at_most(work: float) -> None:
    """Nothing is drafted, so no row is more: the time of whole steps alone shows it."""
    cost, _ = guarded(StepGuard(), lambda _, awake: 0.02 * (1.0 + work * awake), steps=2000)
    assert cost <= 1.02


@pytest.mark.parametrize("work", [0.05, 0.2])
def test_it_costs_no_more_on_a_busy_machine(work: float) -> None:
    """Losses are believed late there, and paid by a longer rest."""
    chance, guard = random.Random(3), StepGuard()
    seconds = quiet_seconds = 0.0
    for _ in range(12_000):
        awake = guard.awake
        quiet = 0.01 * chance.lognormvariate(0.0, 0.2) * (1.45 if chance.random() < 0.1 else 1.0)
        guard.report(StepSize(1, 1), quiet * (1.0 + work * awake), drafted=0, accepted=0, awake=awake)
        seconds, quiet_seconds = seconds + quiet * (1.0 + work * awake), quiet_seconds + quiet
    assert seconds / quiet_seconds <= 1.015


def test_drafts_that_pay_less_than_their_work_are_given_up() -> None:
    guard = StepGuard()
    cost, awake = guarded(guard, lambda rows, awake: 0.001 * rows + 0.004 * awake, drafts=1, accepted=1, steps=2000)
    assert cost <= 1.02 and awake < 100
    assert guard.trials > 2


def test_drafts_that_pay_are_kept_and_quiet_steps_are_few() -> None:
    cost, awake = guarded(StepGuard(), lambda rows, awake: 0.02 + 1e-5 * rows + 0.001 * awake, drafts=3, accepted=2)
    assert cost < 0.4
    assert awake > 970


def test_a_text_that_begins_to_repeat_is_drafted_within_two_hundred_steps() -> None:
    guard = StepGuard()
    guarded(guard, lambda _, awake: 0.02 + 0.002 * awake, drafts=1, accepted=0)
    assert guard.resting
    cost, awake = guarded(guard, lambda _, awake: 0.02 + 0.002 * awake, drafts=1, accepted=1)
    assert awake > 750 and cost < 0.7


def test_a_machine_that_changes_its_pace_earns_drafting_nothing() -> None:
    """Quiet steps measured in a slow second do not make the awake ones of a quick second look cheap."""
    chance = random.Random(3)
    pace = 1.0

    def step_time(rows: int, awake: bool) -> float:
        nonlocal pace
        pace = min(max(pace * chance.uniform(0.97, 1.031), 0.5), 2.0)
        return pace * chance.uniform(0.95, 1.1) * (0.001 * rows + 0.004 * awake)

    guard = StepGuard()
    for number in range(4000):
        awake = guard.awake
        guard.report(StepSize(16, 16), step_time(16, awake), drafted=0, accepted=0, awake=awake)
        assert guard.credit.credit <= FIRST_CREDIT + 0.1, number


def test_a_stall_does_not_stop_drafts_that_pay() -> None:
    guard, steps = StepGuard(), iter(range(10_000))

    def step_time(rows: int, awake: bool) -> float:
        return 2.0 if next(steps) % 40 == 39 else 0.02 + 1e-5 * rows + 0.001 * awake

    guarded(guard, step_time, drafts=2, accepted=1, steps=400)
    assert not guard.resting and guard.credit.credit > MAX_CREDIT / 2


def test_a_busy_machine_does_not_stop_drafts_that_pay() -> None:
    """Steps vary by an eighth, and every seventh is held up by half: a first few of them look like a loss."""
    resting = 0
    for seed in range(60):
        chance, guard = random.Random(seed), StepGuard()

        def step_time(_: int, awake: bool, chance: random.Random = chance) -> float:
            held_up = 1.45 if chance.random() < 0.15 else 1.0
            return 0.01 * chance.lognormvariate(0.0, 0.12) * held_up * (1.0 + 0.15 * awake)

        for _ in range(300):
            awake = guard.awake
            guard.report(StepSize(1, 1), step_time(1, awake), drafted=0, accepted=0.3 * awake, awake=awake)
        resting += guard.resting or guard.trials > 0
    assert resting <= 6  # of two thirds, if means are compared with medians and a first step is believed


def test_prompts_in_a_step_are_no_loss_by_drafts() -> None:
    guard = StepGuard()
    guarded(
        guard,
        lambda rows, _: 0.02 + 0.0001 * rows,
        drafts=2,
        accepted=1,
        others=lambda number: 100 if number % 3 == 0 else 0,
    )
    assert not guard.resting and guard.credit.credit > MAX_CREDIT / 2


def test_requests_that_gain_do_not_slow_down_those_that_do_not() -> None:
    """One of four writes four tokens a step, and each step takes half as long again: three would wait for one."""
    guard = StepGuard()
    awake_steps = 0
    for _ in range(1000):
        awake, rows = guard.awake, 4 + 3 * guard.awake
        step, seconds = StepSize(rows, 4), 0.02 + 0.01 * awake
        for drafted in (3 * awake, 0, 0, 0):
            guard.report(step, seconds, drafted=drafted, accepted=float(drafted), awake=awake)
        awake_steps += awake
    assert awake_steps < 100
