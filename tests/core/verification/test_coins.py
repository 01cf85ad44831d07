"""Drafts accepted or rejected a place at a time: each output token has the target's distribution, whatever was drafted
and however it was truncated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.core.sampling.dist import Dist
from paceline.core.verification import HEAD_IDS, HEAD_MASS, POINTS, Coins, TargetParts, counts_of, draft_dist, prob_of
from tests.core.chi_square import assert_drawn_from

VOCAB, DRAWS = 5, 2000


def dists(seed: int, count: int) -> list[Dist]:
    draw = np.random.default_rng(seed)
    return [Dist.dense(draw.dirichlet(np.full(VOCAB, 0.7))) for _ in range(count)]


Decide = Callable[[int, Dist, int, Dist, Coins], tuple[int, bool]]  # place, draft's distribution, draft, target's


def whole(place: int, draft: Dist, token: int, target: Dist, coins: Coins) -> tuple[int, bool]:
    """Both distributions are where it is decided."""
    if coins.accepts(place, prob_of(draft, token), prob_of(target, token)):
        return token, True
    return coins.recover(place, draft, target), False


def in_parts(place: int, draft: Dist, token: int, target: Dist, coins: Coins, *, precise: bool) -> tuple[int, bool]:
    """The target's side sees the probability of the draft alone, the drafter a head of the target."""
    parts = TargetParts.of(target, precise=precise)
    if coins.happens(place, parts.rest_mass):
        drawn = coins.draw(place, parts.rest, "rest")
        return drawn, drawn == token
    if coins.accepts(place, draft.prob(token), prob_of(parts.head, token)):
        return token, True
    return coins.recover(place, draft, parts.head), False


def outputs(decide: Decide, draft: Sequence[Dist], target: Sequence[Dist], coins: Coins, *, mass: float) -> list[int]:
    """A chain of drafts: the tokens up to the first that is not the draft, or one behind them all."""
    found: list[int] = []
    for place, dist in enumerate(draft):
        drawn_from = draft_dist(dist, mass=mass)
        token, goes_on = decide(place, drawn_from, coins.draw(place, drawn_from, "draft"), target[place], coins)
        found.append(token)
        if not goes_on:
            return found
    return [*found, coins.draw(len(draft), target[len(draft)], "rest")]


@pytest.mark.parametrize(
    ("how", "mass"),
    [
        ("whole", 1.0),
        ("whole", 0.6),
        ("whole", 0.01),
        ("in parts", 1.0),
        ("in parts, precise", 1.0),
        ("in narrow parts", 1.0),
    ],
)
def test_every_output_token_has_the_targets_distribution(
    how: str, mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token always has one; each further one given that the text got there (independent rows here)."""
    if how == "in narrow parts":  # so that much is of the rest
        monkeypatch.setattr("paceline.core.verification.HEAD_IDS", 2)
    decide: Decide = whole if how == "whole" else lambda *args: in_parts(*args, precise="precise" in how)
    draft, target = dists(1, 3), dists(2, 4)
    seen = [Counter[int]() for _ in range(4)]
    lengths = Counter[int]()
    for seed in range(DRAWS):
        found = outputs(decide, draft, target, Coins(seed), mass=mass)
        lengths[len(found)] += 1
        for place, token in enumerate(found):
            seen[place][token] += 1
    assert len(lengths) == 4, "every length occurs"
    for place, counts in enumerate(seen):
        assert_drawn_from([counts[token] for token in range(VOCAB)], target[place].probs)


def test_acceptance_is_one_less_the_total_variation() -> None:
    (draft,), (target,) = dists(3, 1), dists(4, 1)
    drawn_from = draft_dist(draft)
    accepted = sum(
        whole(0, drawn_from, Coins(seed).draw(0, drawn_from, "draft"), target, Coins(seed))[1] for seed in range(DRAWS)
    )
    expected = float(np.minimum(draft.probs, target.probs).sum())
    assert accepted / DRAWS == pytest.approx(expected, abs=4 * (0.25 / DRAWS) ** 0.5)


def test_a_draft_of_equal_distributions_is_always_accepted() -> None:
    drawn_from = draft_dist(dists(5, 1)[0])
    assert all(
        whole(0, drawn_from, Coins(seed).draw(0, drawn_from, "draft"), drawn_from, Coins(seed))[1]
        for seed in range(500)
    )


def test_a_draft_of_no_probability_is_rejected_and_a_residual_without_mass_is_the_target() -> None:
    point = Dist(np.array([2], dtype=np.int32), np.array([1.0]))
    (target,) = dists(6, 1)
    assert not Coins(0).accepts(0, 0.0, 0.5)
    assert Coins(0).recover(0, point, point) == 2
    assert Coins(0).recover(0, target, target) in range(VOCAB)


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_a_token_without_mass_is_never_drawn(seed: int, position: int) -> None:
    dist = Dist(np.array([0, 3, 7, 9], dtype=np.int32), np.array([0.0, 0.25, 0.25, 0.0]))
    assert Coins(seed).draw(position, dist, "rest") in (3, 7)
    with pytest.raises(ValueError, match="no token"):
        Coins(seed).draw(position, Dist(np.array([3], dtype=np.int32), np.array([0.0])), "rest")


# ---- distributions on the grid and targets in parts: nothing is lost in rounding ------------------------------------
weights = arrays(np.float64, st.integers(1, 3000), elements=st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 0.1, 0.7, 3.0]))
drawn = weights.filter(lambda probs: probs.sum() > 0.0).map(lambda probs: Dist.dense(probs / probs.sum()))


@given(drawn)
def test_a_law_on_the_grid_sums_to_exactly_one_and_is_the_nearest(dist: Dist) -> None:
    on_points = draft_dist(dist)
    assert float(on_points.probs.sum()) == 1.0 and on_points.probs.min() > 0.0 and np.all(np.diff(on_points.ids) > 0)
    assert int(counts_of(on_points).sum()) == POINTS and np.array_equal(counts_of(on_points) / POINTS, on_points.probs)
    on_grid = np.zeros(len(dist.ids))
    on_grid[on_points.ids] = on_points.probs
    assert np.abs(on_grid - dist.probs).max() < 1.0 / POINTS + 1e-12
    assert np.abs(np.cumsum(on_grid) - np.cumsum(dist.probs)).max() <= 0.5 / POINTS + 1e-12, "no mass moves far"


@given(drawn, st.sampled_from([0.5, 0.9, 0.99995]), st.integers(1, 50))
def test_a_truncated_law_has_the_likeliest_ids_and_no_more_than_it_may(dist: Dist, mass: float, most: int) -> None:
    on_points = draft_dist(dist, mass=mass, max_ids=most)
    assert len(on_points.ids) <= most and float(on_points.probs.sum()) == 1.0
    left_out = np.delete(dist.probs, on_points.ids)
    top = np.sort(dist.probs)[::-1]
    enough = min(int(np.searchsorted(np.cumsum(top), mass - 1e-9)) + 1, most)
    assert left_out.max(initial=0.0) <= max(top[min(enough, len(top)) - 1], 2.0 / POINTS)


def test_a_distribution_without_mass_has_no_law() -> None:
    with pytest.raises(ValueError, match="no token"):
        draft_dist(Dist.dense(np.zeros(3)))


@given(drawn, st.booleans())
def test_the_parts_of_a_target_are_the_whole_of_it(dist: Dist, precise: bool) -> None:
    filtered = dist.kept(dist.probs >= dist.probs.max() / 100)  # with a tail, which is never drawn
    for final in (dist, filtered):
        parts = TargetParts.of(final, precise=precise)
        both = parts.rest.probs.copy()
        both[np.searchsorted(final.ids, parts.head.ids)] += parts.head.probs
        assert np.allclose(both, final.probs / final.probs.sum(), atol=1e-15, rtol=1e-12)
        assert parts.rest.probs.min() >= 0.0 and 0 < len(parts.head.ids) <= HEAD_IDS
        if len(final.ids) <= HEAD_IDS:
            assert parts.rest_mass < 1.0 - HEAD_MASS + 0.002
