"""Dense and sparse distributions, and the mass in the tail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling.dist import Dist, best_indices, token_ids


def sparse(probs: dict[int, float], tail: float = 0.0) -> Dist:
    return Dist(np.array(sorted(probs), dtype=np.int32), np.array([probs[i] for i in sorted(probs)]), tail)


def test_ids_of_a_vocabulary_are_one_read_only_array() -> None:
    assert token_ids(7) is Dist.dense(np.full(7, 1 / 7)).ids
    with pytest.raises(ValueError, match="read-only"):
        token_ids(7)[0] = 3


def test_probability_of_a_token_dense_and_sparse() -> None:
    dense = Dist.dense(np.array([0.25, 0.75]))
    assert [dense.prob(i) for i in (-1, 0, 1, 2)] == [0.0, 0.25, 0.75, 0.0]
    few = sparse({3: 0.5, 9: 0.25}, tail=0.25)
    assert [few.prob(i) for i in (0, 3, 4, 9, 10)] == [0.0, 0.5, 0.0, 0.25, 0.0]


def test_of_equals_the_lowest_id_comes_first() -> None:
    few = sparse({4: 0.2, 7: 0.4, 8: 0.4})
    assert few.argmax() == 7
    assert few.top(2) == [(7, 0.4), (8, 0.4)]
    assert few.top(99) == [(7, 0.4), (8, 0.4), (4, 0.2)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3000), st.integers(0, 60))
def test_best_indices_is_a_stable_falling_sort_cut_off(values: list[int], k: int) -> None:
    array = np.array(values, dtype=float)
    assert best_indices(array, k).tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def test_dropped_mass_moves_to_the_tail() -> None:
    dist = Dist.dense(np.array([0.1, 0.2, 0.3, 0.4]))
    by_mask = dist.kept(dist.probs > 0.15)
    for part in (by_mask, dist.kept_at(np.array([1, 2, 3]))):
        assert part.ids.tolist() == [1, 2, 3]
        assert math.isclose(part.tail, 0.1)
    again = by_mask.kept_at(np.array([2]))
    assert math.isclose(again.tail, 0.6)
    assert dist.kept(np.ones(4, dtype=bool)) is dist


def test_entropy_counts_the_tail_as_one_token() -> None:
    assert math.isclose(Dist.dense(np.full(8, 1 / 8)).entropy(), math.log(8))
    assert math.isclose(sparse({5: 0.5}, tail=0.5).entropy(), math.log(2))
    assert Dist.dense(np.array([1.0, 0.0])).entropy() == 0.0
