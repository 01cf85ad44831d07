"""Acceptance rates by rank and margin class, over a prior."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import MAX_RANKS, AcceptanceByRank
from paceline.core.drafting.ngram_drafter import margin_class

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
