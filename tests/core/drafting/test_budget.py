"""The budget on engines with known step times: it drafts where that pays, and costs next to nothing elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import (
    AdaptiveBudget,
    BudgetStats,
)

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
