"""Common random numbers: uniform, independent, equal for every subset, and pinned to golden values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling.dist import (
    GROUP,
    contenders,
    group_minima,
    gumbel,
    gumbel_of,
    gumbel_rows,
    row_keys,
    token_ids,
    uniform,
)
from tests.core.chi_square import assert_drawn_from

seeds = st.integers(-(2**70), 2**70)


def back_to_uniform(noise: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-noise))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 5), (10**30, 100_000)])
def test_noise_over_ids_is_uniform(seed: int, position: int) -> None:
    u = back_to_uniform(gumbel(seed, position, token_ids(20_000)))
    assert_drawn_from(np.histogram(u, bins=100, range=(0, 1))[0], np.full(100, 0.01))
    ranked = np.sort(u)
    places = np.arange(1, len(u) + 1) / len(u)
    assert np.abs(ranked - places).max() * np.sqrt(len(u)) < 2.3  # Kolmogorov-Smirnov, p = 5e-5


@given(seeds, st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_the_noise_of_a_few_tokens_equals_that_of_arrays(seed: int, position: int, tokens: list[int]) -> None:
    all_at_once = gumbel(seed, position, np.array(tokens, dtype=np.int32)).tolist()
    assert gumbel_of(seed, position, tokens) == pytest.approx(all_at_once, rel=1e-12, abs=1e-12)


@given(st.lists(st.tuples(seeds, st.integers(0, 2**40)), min_size=1, max_size=5))
def test_the_noise_of_many_positions_equals_that_of_each(asked: list[tuple[int, int]]) -> None:
    ids = token_ids(100)
    keys = row_keys([seed for seed, _ in asked], [position for _, position in asked])
    for found, (seed, position) in zip(gumbel_rows(keys, np.tile(ids, (len(asked), 1))), asked, strict=True):
        assert found.tolist() == gumbel(seed, position, ids).tolist()


def test_the_ids_of_a_group_are_independent() -> None:
    """The least of a group is drawn first; jointly all of them are still independent exponentials."""
    draws = back_to_uniform(np.array([gumbel(5, position, token_ids(2 * GROUP)) for position in range(4000)]))
    rng = np.random.default_rng(0)
    for a, b in rng.integers(0, 2 * GROUP, size=(40, 2)):
        if a != b:
            cells = np.histogram2d(draws[:, a], draws[:, b], bins=6, range=[[0, 1], [0, 1]])[0].ravel()
            assert_drawn_from(cells.astype(int), np.full(36, 1 / 36))
    best = draws[:, :GROUP].argmax(axis=1)
    assert_drawn_from(np.bincount(best, minlength=GROUP), np.full(GROUP, 1 / GROUP))
    x = np.sort(-np.log(draws[:, :GROUP]), axis=1)
    spacings = np.diff(x, axis=1, prepend=0.0) * np.arange(GROUP, 0, -1)  # independent exponentials (Rényi 1953)
    for rank in (0, 1, 31, 62, 63):
        u = -np.expm1(-spacings[:, rank])
        assert_drawn_from(np.histogram(u, bins=40, range=(0, 1))[0], np.full(40, 1 / 40))


def test_the_least_of_a_group_bounds_all_of_it() -> None:
    keys = row_keys([3, -8], [0, 9])
    least = group_minima(keys, 40)
    for row, (seed, position) in enumerate([(3, 0), (-8, 9)]):
        x = np.exp(-gumbel(seed, position, token_ids(40 * GROUP))).reshape(40, GROUP)
        assert x.min(axis=1) == pytest.approx(least[row], rel=1e-12)


def test_noise_over_positions_and_over_seeds_is_uniform() -> None:
    for draw in (lambda i: gumbel(3, i, token_ids(1)), lambda i: gumbel(i, 3, token_ids(1))):
        u = back_to_uniform(np.array([draw(i)[0] for i in range(4000)]))
        assert_drawn_from(np.histogram(u, bins=50, range=(0, 1))[0], np.full(50, 0.02))


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (-1, 1, 0), (2**64, 0, 0)])
def test_neighbours_are_independent(shift: tuple[int, int, int]) -> None:
    seed, position, token = shift
    ids = token_ids(30_000)
    a = back_to_uniform(gumbel(10, 10, ids))
    b = back_to_uniform(gumbel(10 + seed, 10 + position, ids + np.int32(token)))
    cells = np.histogram2d(a, b, bins=10, range=[[0, 1], [0, 1]])[0].ravel()
    assert_drawn_from(cells.astype(int), np.full(100, 0.01))


def test_uniform_by_position_and_purpose() -> None:
    draws = np.array([uniform(4, i, "coin") for i in range(4000)])
    assert_drawn_from(np.histogram(draws, bins=50, range=(0, 1))[0], np.full(50, 0.02))
    other = np.array([uniform(4, i, "select") for i in range(4000)])
    cells = np.histogram2d(draws, other, bins=8, range=[[0, 1], [0, 1]])[0].ravel()
    assert_drawn_from(cells.astype(int), np.full(64, 1 / 64))
    assert len({uniform(1, 2, name) for name in ("", "a", "aa", "\0", "\0\0", "gumbel", "b")}) == 7


def test_golden_values_both_sides_of_a_link_must_agree_on() -> None:
    ids = np.array([0, 1, 2, 65_536, 151_935], dtype=np.int32)
    expected = {
        (0, 0): [0.219931709109321, -0.278820643175823, 0.473177481927366, -0.0206597711148449, 0.327412045650602],
        (1234, 56): [1.88799855370292, 3.7700332056308, -0.208937005364134, -0.184941998018186, -0.264596507456824],
        (-1, 7): [1.90251590714124, -0.653428886265067, 0.947368394772425, 2.45582938995545, -0.996861411275813],
        (2**64 + 5, 2**33): [
            1.28485634750131,
            -0.785018006952933,
            1.18277908194651,
            0.482935710163907,
            -0.710990863408337,
        ],
    }
    for (seed, position), noise in expected.items():
        assert gumbel(seed, position, ids) == pytest.approx(noise, rel=1e-13)
    assert uniform(0, 0, "coin") == 0.44581319478515236
    assert uniform(1234, 56, "coin") == 0.6690121900443987
    assert uniform(-5, 1, "select") == 0.21546161367549532


@given(seeds, st.integers(0, 2**40), st.lists(st.integers(0, 40_000), min_size=1, max_size=50, unique=True))
def test_noise_of_a_subset_is_the_subset_of_the_noise(seed: int, position: int, chosen: list[int]) -> None:
    subset = np.array(sorted(chosen), dtype=np.int32)
    whole = gumbel(seed, position, token_ids(40_001))
    assert np.array_equal(gumbel(seed, position, subset), whole[subset])


@given(st.integers(0, 10_000), st.floats(-20, 20), st.floats(0.1, 30))
def test_contenders_never_miss_an_id_that_reaches_the_score(seed: int, score: float, spread: float) -> None:
    ids = token_ids(20_000)
    weights = np.exp(np.random.default_rng(seed).normal(size=len(ids)) * spread - 10)
    weights[::7] = 0.0
    with np.errstate(divide="ignore"):
        reached = np.flatnonzero(np.log(weights) + gumbel(seed, 9, ids) >= score)
    named = contenders(seed, 9, ids, weights, score)
    assert set(reached) <= set(named)
    assert np.all(np.diff(named) > 0)
    assert not (weights[named] == 0.0).any()


def test_noise_is_finite_for_millions_of_ids() -> None:
    """u is never 0 or 1, so noise alone neither forbids nor forces a token."""
    noise = gumbel(0, 0, token_ids(1_000_000))
    assert np.isfinite(noise).all()
    assert -3.0 < noise.min() < -2.3
    assert 11.0 < noise.max() < 36.75


def test_without_ids_or_weights_there_are_no_contenders() -> None:
    assert contenders(0, 0, token_ids(0), np.empty(0), 0.0).tolist() == []
    assert contenders(0, 0, token_ids(9), np.zeros(9), 0.0).tolist() == []
