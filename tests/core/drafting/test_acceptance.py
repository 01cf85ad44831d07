"""Which guess the target was: learnt live, by how clear the first guess is, over a prior."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.drafting.acceptance import MAX_RANKS, AcceptanceByRank, margin_class

CLASSES = range(margin_class(math.inf) + 1)


@given(st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_the_larger_the_gap_the_clearer(one: float, other: float) -> None:
    assert (margin_class(one) <= margin_class(other)) == (one <= other) or margin_class(one) == margin_class(other)
    assert margin_class(one) in CLASSES


def test_before_anything_is_learnt_clear_guesses_are_trusted_more() -> None:
    firsts = [AcceptanceByRank().probs(clear)[0] for clear in CLASSES]
    assert firsts == sorted(firsts) and firsts[0] < firsts[-1]


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.none() | st.integers(0, 70)), max_size=200))
def test_what_is_learnt_is_a_part_of_a_distribution(seen: list[tuple[int, int | None]]) -> None:
    table = AcceptanceByRank()
    for clear, rank in seen:
        table.add(clear, rank)
    for clear in CLASSES:
        probs = table.probs(clear)
        assert len(probs) == MAX_RANKS
        assert all(prob > 0.0 for prob in probs) and sum(probs) < 1.0 + 1e-12


@pytest.mark.parametrize("rank", [0, 1, MAX_RANKS - 1, MAX_RANKS, None])
def test_it_comes_to_believe_what_it_sees_and_only_of_that_class(rank: int | None) -> None:
    table, fresh = AcceptanceByRank(), AcceptanceByRank()
    for _ in range(300):
        table.add(1, rank)
    probs = table.probs(1)
    if rank is not None and rank < MAX_RANKS:
        assert probs[rank] > 0.85
    else:
        assert sum(probs) < 0.15
    for clear in CLASSES:
        if clear != 1:
            assert table.probs(clear) == fresh.probs(clear)


def test_it_forgets() -> None:
    table = AcceptanceByRank()
    for rank in [0] * 500 + [1] * 200:
        table.add(0, rank)
    assert table.probs(0)[1] > 0.85
