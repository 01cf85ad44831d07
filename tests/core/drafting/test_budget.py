"""The guard against an engine whose pace is known: it drafts where that pays, and costs nothing where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import (
    CLASSES,
    LONGER,
    RETRY,
    AcceptanceCalibration,
    AdaptiveBudget,
    BudgetStats,
    FixedBudget,
    TimeCredit,
    step_class,
)

Pace = Callable[[int], float]  # seconds of a step of so many rows


def free(rows: int) -> float:
    """Bound by memory: sixteen rows take a tenth longer than one."""
    return 0.05 + 0.0003 * (rows - 1)


def dear(rows: int) -> float:
    """Bound by arithmetic: each row takes as long as the first."""
    return 0.02 * rows


def play(
    record: BudgetStats,
    steps: int,
    pace: Pace,
    stands: Callable[[int], int],
    *,
    promised: float = 0.5,
    sequences: int = 1,
) -> tuple[float, float, list[int]]:
    """Seconds with the guard, and of plain decoding for as many tokens; the drafts of each step.

    All answers of a batch fare alike. stands(drafts): how many of them are output.
    """
    guards = [AdaptiveBudget(record, rows=64) for _ in range(sequences)]
    seconds = plain = 0.0
    drafts = []
    for _ in range(steps):
        probs = [promised * 0.8**i for i in range(min([guard.max_draft_tokens() for guard in guards]))]
        count = min([guard.choose(probs) for guard in guards]) if probs else 0
        stood = min(stands(count), count)
        rows = sequences * (1 + count)
        step = StepSize(rows, sequences)
        for guard in guards:
            guard.record(count, sum(probs[:count]), stood, step, pace(rows))
        seconds += pace(rows)
        plain += (1 + stood) * pace(sequences)
        drafts.append(count)
    return seconds, plain, drafts


@pytest.mark.parametrize("pace", [free, dear])
@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("promised", [0.1, 0.5, 0.99])
def test_drafts_that_never_stand_cost_less_than_three_hundredths(pace: Pace, sequences: int, promised: float) -> None:
    seconds, plain, drafts = play(BudgetStats(), 128, pace, lambda _: 0, promised=promised, sequences=sequences)
    assert plain / seconds >= 0.97, drafts


@given(
    st.floats(0.0, 1.0), st.floats(1e-4, 0.1), st.floats(0.0, 1.0), st.sampled_from([1, 2, 16]), st.integers(0, 1000)
)
def test_never_slower_than_plain_by_more_than_three_hundredths(
    right: float, base: float, slope: float, sequences: int, seed: int
) -> None:
    """Whatever a row costs and however many drafts stand, which no promise foretells."""
    chance = random.Random(seed)

    def stands(count: int) -> int:
        stood = 0
        while stood < count and chance.random() < right:
            stood += 1
        return stood

    seconds, plain, _ = play(
        BudgetStats(), 200, lambda rows: base * (1.0 + slope * (rows - 1)), stands, sequences=sequences, promised=0.9
    )
    assert plain / seconds >= 0.97


def test_it_drafts_where_rows_are_free_and_drafts_stand() -> None:
    seconds, plain, drafts = play(BudgetStats(), 200, free, lambda count: min(count, 2), promised=0.8)
    assert plain / seconds > 2.0
    assert sum(count > 0 for count in drafts) > 180


def test_what_pays_for_one_does_not_for_sixteen_on_a_busy_engine() -> None:
    def pace(rows: int) -> float:
        return 0.05 if rows <= 32 else 0.05 * rows / 32

    _, _, alone = play(BudgetStats(), 100, pace, lambda count: min(count, 1), promised=0.3)
    _, _, together = play(BudgetStats(), 100, pace, lambda count: min(count, 1), promised=0.3, sequences=16)
    assert sum(alone) > 4 * sum(together)
    assert max(together[50:]) <= 3


def test_a_text_that_becomes_predictable_is_drafted_again() -> None:
    record = BudgetStats()
    play(record, 100, free, lambda _: 0)
    assert record.share.calibration < 0.1
    _, _, drafts = play(record, 300, free, lambda count: min(count, 2))
    assert sum(count > 0 for count in drafts[200:]) > 80


def test_what_one_answer_saved_another_may_lose_only_in_part() -> None:
    def pace(rows: int) -> float:
        return 0.04 + 0.005 * rows

    record = BudgetStats()
    play(record, 200, pace, lambda count: min(count, 3), promised=0.9)
    assert record.account.credit > 15.0
    seconds, plain, _ = play(record, 100, pace, lambda _: 0, promised=0.9)
    assert 0.0 < (seconds - plain) / pace(1) < 5.0


def test_a_stall_is_not_the_drafts_fault() -> None:
    record = BudgetStats()
    play(record, 50, free, lambda count: min(count, 2), promised=0.8)
    calls = iter([0] * 4 + [1] + [0] * 1000)

    def stalls(rows: int) -> float:
        return 2.0 if next(calls) else free(rows)

    _, _, drafts = play(record, 40, stalls, lambda count: min(count, 2), promised=0.8)
    assert sum(count > 0 for count in drafts) > 35


def test_what_nobody_can_use_is_not_believed() -> None:
    record, guard = BudgetStats(), AdaptiveBudget(BudgetStats(), rows=8)
    guard.record(4, 1.0, 1, StepSize(5, 1), 0.0)  # no time has passed
    guard.record(4, 1.0, 1, StepSize(5000, 1), 1.0)  # somebody's prompt was in it
    assert guard.stats()["draft_steps"] == 0
    record.record_step(StepSize(5000, 1), 1.0)
    assert not record.measured


def test_promises_are_judged_by_what_stood() -> None:
    share = AcceptanceCalibration()
    for _ in range(200):
        share.add(2.0, 1)
    assert share.calibration == pytest.approx(0.5, abs=0.02)
    assert share.for_next_request().calibration == share.calibration


def test_an_account_is_bounded_on_both_sides() -> None:
    account = TimeCredit(0.0)
    for _ in range(1000):
        account.drafted(1.0)
    assert account.credit == 16.0
    for _ in range(1000):
        account.drafted(-1.0)
    assert account.credit == -1.0
    account.plain(1)
    assert account.credit > -1.0


def test_a_fixed_budget_is_taken_whole() -> None:
    budget = FixedBudget(3)
    assert budget.max_draft_tokens() == 3 and budget.choose([0.1] * 5) == 3 and budget.choose([0.1]) == 1
    budget.record(3, 0.3, 0, StepSize(4, 1), 1.0)
    assert budget.stats() == {}


def test_classes_of_row_counts() -> None:
    assert [step_class(rows) for rows in (1, 5, 64, 65, 5000)] == [1, 6, 64, 80, CLASSES[-1]]


def test_between_trees_that_come_to_nothing_more_is_waited_the_more_there_were_of_all_and_of_this_answer() -> None:
    record = BudgetStats()
    waits: dict[int, list[int]] = {}
    for others in (0, 2 * LONGER, 100 * LONGER):
        record.idle, guard = others, AdaptiveBudget(record, rows=8)
        waits[others] = []
        for _ in range(5):
            assert guard.choose((1e-6,)) == 0
            waits[others].append(guard._pause)
    assert waits == {
        0: [1, 3, 7, 15, RETRY],
        2 * LONGER: [2 * RETRY, 3 * RETRY, 3 * RETRY, 3 * RETRY, 3 * RETRY],
        100 * LONGER: [2 * RETRY, 3 * RETRY, 4 * RETRY, 4 * RETRY, 4 * RETRY],
    }
