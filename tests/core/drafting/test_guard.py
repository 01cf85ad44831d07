"""The guard on engines with known step times, the work for drafts on the host included."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import (
    FIRST_CREDIT,
    MAX_CREDIT,
    StepGuard,
)

StepTime = Callable[[int, bool], float]  # rows, awake → seconds


def play(
    guard: StepGuard,
    step_time: StepTime,
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
    cost, _ = play(StepGuard(), lambda _, awake: 0.02 * (1.0 + work * awake), steps=2000)
    assert cost <= 1.02


def test_drafts_that_pay_less_than_their_work_are_given_up() -> None:
    guard = StepGuard()
    cost, awake = play(guard, lambda rows, awake: 0.001 * rows + 0.004 * awake, drafts=1, accepted=1, steps=2000)
    assert cost <= 1.02 and awake < 100
    assert guard.trials > 2


def test_drafts_that_pay_are_kept_and_quiet_steps_are_few() -> None:
    cost, awake = play(StepGuard(), lambda rows, awake: 0.02 + 1e-5 * rows + 0.001 * awake, drafts=3, accepted=2)
    assert cost < 0.4
    assert awake > 970


def test_a_text_that_begins_to_repeat_is_drafted_within_two_hundred_steps() -> None:
    guard = StepGuard()
    play(guard, lambda _, awake: 0.02 + 0.002 * awake, drafts=1, accepted=0)
    assert guard.resting
    cost, awake = play(guard, lambda _, awake: 0.02 + 0.002 * awake, drafts=1, accepted=1)
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

    play(guard, step_time, drafts=2, accepted=1, steps=400)
    assert not guard.resting and guard.credit.credit > MAX_CREDIT / 2


def test_prompts_in_a_step_are_no_loss_by_drafts() -> None:
    guard = StepGuard()
    play(
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
