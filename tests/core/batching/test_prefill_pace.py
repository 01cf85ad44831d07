"""Long prompts beside answers: no gap is more than doubled, whatever a row costs, and the prompts advance."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from paceline.core.batching.scheduler import FAR, FAR_ROWS, Scheduler, SchedulerOutput
from paceline.core.batching.segment import Segment, SeqId

ANSWERS = 16
PROMPT = 30_000


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: one reading of the weights, each row, each row's attention, and reading a long sequence."""

    weights: float
    row: float
    pair: float  # of a row and a row before it
    cached: float  # of a row before a chunk, however long the chunk

    def seconds(self, scheduled: SchedulerOutput) -> float:
        total = self.weights
        for each in scheduled.segments:
            rows, start = len(each.segment.tokens), each.segment.start
            total += rows * self.row + rows * start * self.pair + (start * self.cached if rows > 1 else 0.0)
        return total


MACHINES = {
    "two cores": Machine(0.045, 1e-3, 3e-8, 5e-7),
    "two slow cores": Machine(0.1, 1e-2, 1e-7, 2e-6),
    "a GPU": Machine(0.008, 1e-5, 2e-10, 5e-9),
}


def steps_beside_answers(machine: Machine, noise: Callable[[], float] = lambda: 1.0) -> tuple[list[float], list[float]]:
    """Seconds of steps of answers alone, and of all steps until a prompt of 30,000 rows is done."""
    scheduler = Scheduler(512, 256)
    position = 100

    def step() -> float:
        nonlocal position
        for seq in range(ANSWERS):
            scheduler.add(position * ANSWERS + seq, Segment(SeqId(seq), position, (1,)))
        position += 1
        scheduled = scheduler.schedule()
        assert scheduled is not None
        assert sum(len(each.segment.tokens) == 1 for each in scheduled.segments) >= ANSWERS  # none waits
        seconds = machine.seconds(scheduled) * noise()
        scheduler.took(seconds)
        return seconds

    alone = [step() for _ in range(50)]
    scheduler.add(-2, Segment(SeqId(99), 0, tuple(range(PROMPT))))
    beside: list[float] = []
    while scheduler.last(SeqId(99)) is not None:
        beside.append(step())
    return alone, beside


def percentile_95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


@pytest.mark.parametrize("name", MACHINES)
def test_gaps_of_answers_are_at_most_doubled_beside_a_long_prompt(name: str) -> None:
    machine = MACHINES[name]
    alone, beside = steps_beside_answers(machine)
    assert percentile_95(beside) <= 2.0 * percentile_95(alone)
    assert max(beside) <= 4.0 * max(alone)
    # The prompt has two fifths of the time, less what its chunks cost however short they are.
    extra = sum(beside) - len(beside) * statistics.median(alone)
    assert extra >= 0.35 * sum(beside) or max(beside) < 1.75 * max(alone)


def test_gaps_are_at_most_doubled_where_the_times_of_steps_vary() -> None:
    draw = random.Random(1)
    alone, beside = steps_beside_answers(MACHINES["two cores"], lambda: draw.uniform(0.8, 1.2))
    assert percentile_95(beside) <= 2.0 * percentile_95(alone)


def test_a_prompt_has_whole_steps_where_nobody_writes() -> None:
    scheduler = Scheduler(512, 256)
    scheduler.add(1, Segment(SeqId(1), 0, tuple(range(1200))))
    rows = []
    while (scheduled := scheduler.schedule()) is not None:
        rows.append(scheduled.batch.num_rows)
        scheduler.took(10.0)
    assert rows == [512, 512, 176]


def test_the_end_of_a_long_prompt_and_the_new_part_of_a_cached_one_are_limited_too() -> None:
    """Else a hundred rows behind thirty thousand stop all answers for seconds; drafts run whole everywhere."""
    scheduler = Scheduler(512, 256)
    for key in range(60):
        scheduler.add(key, Segment(SeqId(1), key, (1,)))
        assert scheduler.schedule() is not None
        scheduler.took(0.01)
    rows = []
    scheduler.add(100, Segment(SeqId(2), FAR + 1, tuple(range(100))))
    scheduler.add(101, Segment(SeqId(3), FAR + 1, tuple(range(FAR_ROWS)), None, "all"))
    for key in range(200, 400):
        scheduler.add(key, Segment(SeqId(1), key - 140, (1,)))
        scheduled = scheduler.schedule()
        assert scheduled is not None
        sizes = {each.key: len(each.segment.tokens) for each in scheduled.segments}
        assert sizes.get(101, FAR_ROWS) == FAR_ROWS
        rows.append(sizes.get(100, 0))
        scheduler.took(0.01 + 0.001 * rows[-1])
    assert sum(rows) == 100
    assert max(rows) <= 16
