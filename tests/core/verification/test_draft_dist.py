"""Distributions on the grid and targets in parts: nothing is lost in rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.core.sampling.dist import Dist
from paceline.core.verification import HEAD_IDS, HEAD_MASS, POINTS, TargetParts, counts_of, draft_dist

weights = arrays(np.float64, st.integers(1, 3000), elements=st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 0.1, 0.7, 3.0]))
dists = weights.filter(lambda probs: probs.sum() > 0.0).map(lambda probs: Dist.dense(probs / probs.sum()))


@given(dists)
def test_a_law_on_the_grid_sums_to_exactly_one_and_is_the_nearest(dist: Dist) -> None:
    on_points = draft_dist(dist)
    assert float(on_points.probs.sum()) == 1.0 and on_points.probs.min() > 0.0 and np.all(np.diff(on_points.ids) > 0)
    assert int(counts_of(on_points).sum()) == POINTS and np.array_equal(counts_of(on_points) / POINTS, on_points.probs)
    on_grid = np.zeros(len(dist.ids))
    on_grid[on_points.ids] = on_points.probs
    assert np.abs(on_grid - dist.probs).max() < 1.0 / POINTS + 1e-12
    assert np.abs(np.cumsum(on_grid) - np.cumsum(dist.probs)).max() <= 0.5 / POINTS + 1e-12, "no mass moves far"


@given(dists, st.sampled_from([0.5, 0.9, 0.99995]), st.integers(1, 50))
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


@given(dists, st.booleans())
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
