"""What steps take by their rows: rising, joined, forgotten when it is old, and robust against stalls."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.pending import SEEN, StepTimes


def seen(*steps: tuple[int, float], times: int = SEEN) -> StepTimes:
    found = StepTimes()
    for rows, seconds in steps * times:
        found.record(rows, seconds)
    return found


def test_times_between_and_beyond_what_was_seen_are_on_lines() -> None:
    times = seen((2, 0.1), (8, 0.1), (16, 0.3))
    assert [times.at(rows) for rows in (2, 5, 8, 12, 16)] == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.3])
    assert times.at(30) == pytest.approx(0.5) and times.at(1) == pytest.approx(0.1 - 0.2 / 14)
    assert times.most_rows == 32
    assert seen((64, 1.0)).at(16) == 1.0 and seen((64, 1.0)).at(128) == 1.0


def test_rows_that_are_priced_alone_cost_in_proportion() -> None:
    assert seen((8, 0.8), (16, 1.6)).at(1) == pytest.approx(0.1)


def test_stalls_change_nothing() -> None:
    draw, times = Random(3), StepTimes()
    for _ in range(400):
        rows = draw.choice((1, 8, 64))
        times.record(rows, (0.01 + 0.001 * rows) * (5.0 if draw.random() < 0.1 else 1.0))
    for rows in (1, 8, 64):
        assert times.at(rows) == pytest.approx(0.01 + 0.001 * rows)


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 10.0)), min_size=1, max_size=60))
def test_more_rows_never_take_less(steps: list[tuple[int, float]]) -> None:
    times = seen(*steps, times=1)
    found = [times.at(rows) for rows in range(1, 700)]
    assert all(0.0 < before <= after * (1 + 1e-9) for before, after in itertools.pairwise(found))
