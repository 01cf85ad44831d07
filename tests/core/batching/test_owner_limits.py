"""Rows of one owner in a step beside others': no owner makes a step more than half as long again, none starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.pending import MEMORY, STAYS, OwnerLimits, scheduler_clock
from paceline.core.batching.pending import OWNER_SHARE as SHARE
from paceline.core.batching.scheduler import Scheduler, SchedulerOutput
from tests.core.batching.loads import Load

StepTime = Callable[[int], float]  # rows → seconds
CPU: StepTime = lambda rows: 0.045 + 0.001 * rows  # noqa: E731  # a formula with a name
GPU: StepTime = lambda rows: 0.008 + 1e-5 * max(0, rows - 128)  # noqa: E731


class Limited(Load):
    """Owners that each continue so many answers, one row in each step, on a machine of this step time."""

    def __init__(self, time: StepTime, *, noise: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__(Scheduler(512, 256))
        self.time, self.noise = time, noise
        self.decodes: set[int] = set()  # keys of rows of answers

    def add(self, owner: str, seq: int, rows: int = 1, **of: object) -> int:
        key = super().add(owner, seq, rows, **of)  # type: ignore[arg-type]
        if rows == 1:
            self.decodes.add(key)
        return key

    def answers(self, owner: str, number: int, first: int) -> None:
        """Continue those of these answers that are not waiting."""
        busy = {seq for _, seq, _ in self.waiting.values()}
        for seq in range(first, first + number):
            if seq not in busy:
                self.add(owner, seq)

    def ran(self, scheduled: SchedulerOutput) -> None:
        oldest = {owner: key for key, (owner, _, _) in reversed(self.waiting.items()) if key in self.decodes}
        full = scheduled.batch.num_rows > 300 or len(scheduled.segments) > 200
        first: dict[str, int] = {}
        for each in scheduled.segments:
            owner = self.waiting[each.key][0]
            first[owner] = min(each.key, first.get(owner, each.key))
        assert full or all(first.get(owner, key + 1) <= key for owner, key in oldest.items()), "it or an older one runs"
        self.scheduler.took(self.time(scheduled.batch.num_rows) * self.noise())


def flooded(load: Limited, steps: int, flood: int = 64) -> list[Counter[str]]:
    """One owner of one answer, then beside another's many."""
    for _ in range(10):
        load.answers("one", 1, 0)
        load.step()
    had = []
    for _ in range(steps):
        load.answers("many", flood, 100)
        load.answers("one", 1, 0)
        had.append(load.step())
    return had


def test_one_with_many_answers_makes_no_gap_of_another_half_as_long_again() -> None:
    had = flooded(Limited(CPU), 400)
    gaps = [CPU(rows.total()) for rows in had]
    assert all(rows["one"] == 1 for rows in had)
    assert CPU(65) / CPU(1) > 2.3, "what it was without a limit"
    assert max(gaps) <= 1.6 * CPU(1) and max(gaps[20:]) <= 1.5 * CPU(1), "first, while more rows are tried"
    assert sum(rows["many"] for rows in had) >= 0.9 * 20 * 400, "and the limit is used"


def test_gaps_stay_short_where_the_times_of_steps_vary() -> None:
    draw = Random(1)
    had = flooded(Limited(CPU, noise=lambda: draw.uniform(0.8, 1.25)), 1000)
    gaps = sorted(CPU(rows.total()) for rows in had)
    assert gaps[950] <= 1.7 * CPU(1) and sum(gaps) <= 1.5 * CPU(1) * len(gaps)


def test_rows_that_are_free_are_not_held_back() -> None:
    had = flooded(Limited(GPU), 3 * MEMORY)
    held_back = [rows for rows in had if rows["many"] < 64]
    assert len(held_back) <= 20, "while the time of so many rows is unknown, doubling them from step to step"
    draw = Random(2)
    noisy = flooded(Limited(GPU, noise=lambda: draw.uniform(0.9, 1.1)), 3 * MEMORY)
    assert sum(rows["many"] for rows in noisy) >= 0.95 * 64 * len(noisy)


@pytest.mark.parametrize(("owners", "answers"), [(2, 8), (16, 4), (64, 1), (3, 60)])
def test_owners_with_as_many_answers_each_are_not_limited(owners: int, answers: int) -> None:
    load, held_back = Limited(CPU), 0
    for step in range(300):
        for owner in range(owners):
            load.answers(f"owner {owner}", answers, 1000 * owner)
        held_back += load.step().total() < owners * answers and step >= 20
    assert held_back == 0


def test_an_owner_that_is_alone_has_all_its_rows_at_once_and_soon_after_another_has_gone() -> None:
    load = Limited(CPU)
    flooded(load, 50)
    had = []
    for _ in range(STAYS + 2):
        load.answers("many", 64, 100)
        had.append(load.step()["many"])
    assert had[0] <= 22 and had[-1] == 64
    alone = Limited(CPU)
    for _ in range(5):
        alone.answers("many", 200, 0)
        assert alone.step() == {"many": 200}


@given(st.lists(st.integers(1, 100), min_size=2, max_size=6), st.floats(0.0, 0.1), st.floats(1e-6, 1e-2))
def test_what_an_owner_adds_is_bounded_and_no_more_is_held_back_than_that_needs(
    demands: list[int], base: float, row: float
) -> None:
    limits, owners = OwnerLimits(scheduler_clock()), {f"owner {number}": rows for number, rows in enumerate(demands)}

    def seconds(rows: int) -> float:
        return base + row * rows

    for rows in (1, 2, 8, 64, 512) * 3:
        limits.times.add(rows, seconds(rows))
    limits.begin()
    found = limits.limits(owners)
    had = {owner: min(rows, found.get(owner, rows)) for owner, rows in owners.items()}
    total = sum(had.values())
    for rows in had.values():
        assert rows == 1 or seconds(total) <= (1 + SHARE) * seconds(total - rows) * 1.001
    if found:
        level = max(had.values()) + 1
        more = sum(min(rows, level) for rows in demands)
        assert seconds(more) >= (1 + SHARE) * seconds(more - level) * 0.999


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.integers(1, 8), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([CPU, GPU, lambda rows: 0.001 * rows]),
)
def test_nothing_starves_beside_limits(
    arrivals: list[tuple[str, int, int, bool, int]], time: Callable[[int], float]
) -> None:
    """`Limited.ran` asserts that an owner's oldest row of an answer runs, or what it asked for before. In the
    end all run."""
    load = Limited(time)
    for number, (owner, rows, branches, tree, pause) in enumerate(arrivals):
        for branch in range(branches):
            load.add(owner, 10 * number + branch, rows, group=number, tree=tree)
        for _ in range(pause):
            if load.waiting:
                load.step()
    steps = 0
    while load.waiting:
        load.step()
        steps += 1
        assert steps <= 20 * 8 * 100


def test_branches_of_one_answer_run_together_where_they_may() -> None:
    load = Limited(CPU)
    for _ in range(10):
        load.answers("one", 1, 0)
        load.step()
    for _ in range(60):
        busy = {group for owner, group, _ in load.waiting.values() if owner == "many"}
        for answer in range(8):  # of eight branches each
            branches = range(100 + 8 * answer, 108 + 8 * answer)
            if not busy & set(branches):
                for seq in branches:
                    load.add("many", seq, group=100 + answer)
        load.answers("one", 1, 0)
        before = Counter((seq - 100) // 8 for owner, seq, _ in load.waiting.values() if owner == "many")
        load.step()
        after = Counter((seq - 100) // 8 for owner, seq, _ in load.waiting.values() if owner == "many")
        assert sum(before[answer] != after[answer] != 0 for answer in before) <= 1
    assert CPU(1 + 16) <= 1.5 * CPU(1), "two answers in a step"


def test_an_answer_with_more_branches_than_a_step_may_have_runs_in_several() -> None:
    load = Limited(CPU)
    flooded(load, 60, flood=30)
    while load.waiting:
        load.step()
    for seq in range(500, 564):
        load.add("many", seq, group=500)
    steps = 0
    while any(owner == "many" for owner, _, _ in load.waiting.values()):
        load.answers("one", 1, 0)
        assert CPU(load.step().total()) <= 1.5 * CPU(1)
        steps += 1
    assert steps == 4


def test_prompts_of_one_owner_beside_anothers_answer_add_no_more_than_its_answers_may() -> None:
    """Long prompts and short ones, and answers beside them: together they add half of a step."""
    load = Limited(CPU)
    for _ in range(10):
        load.answers("one", 1, 0)
        load.step()
    seq, gaps, prompt_rows = 10_000, [], 0
    for step in range(400):
        load.answers("many", 32, 100)
        load.answers("one", 1, 0)
        if sum(rows > 1 for _, _, rows in load.waiting.values()) < 4:
            seq += 1
            load.add("many", seq, 100 if step % 2 else 2000)
        before = sum(rows for _, _, rows in load.waiting.values() if rows > 1)
        had = load.step()
        prompt_rows += before - sum(rows for _, _, rows in load.waiting.values() if rows > 1)
        assert had["one"] == 1
        gaps.append(CPU(had.total()))
    assert max(gaps[100:]) <= 1.6 * CPU(1)
    assert sorted(gaps)[380] <= 1.5 * CPU(1)
    assert prompt_rows >= 400 * 4
