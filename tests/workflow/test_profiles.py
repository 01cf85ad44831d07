"""Profiles: regression against known answers, slowdowns that never fall, shapes by enumeration, JSON."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.workflow.activity import Slowdown, fit_slowdown, nonnegative_least_squares
from paceline.workflow.placement import best_shape, seconds_for, shapes_to_try
from paceline.workflow.profiling import OperationProfile, ProfileStore, ShapePoint

CURVE = OperationProfile([ShapePoint(1, 0.05, 10.0), ShapePoint(4, 0.08, 20.0), ShapePoint(8, 0.2, 30.0)])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_non_negative_least_squares_satisfies_the_optimality_conditions(seed: int) -> None:
    """Karush-Kuhn-Tucker: no coefficient below 0, no gradient that a feasible step could use."""
    rng = np.random.default_rng(seed)
    matrix, values = rng.normal(size=(12, 4)), rng.normal(size=12)
    found = nonnegative_least_squares(matrix, values)
    gradient = matrix.T @ (values - matrix @ found)
    assert (found >= 0.0).all() and (gradient <= 1e-7).all()
    assert np.allclose(gradient[found > 0.0], 0.0, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0.2, 5)), min_size=3, max_size=30))
def test_a_fitted_slowdown_is_1_at_first_and_never_falls_whatever_the_samples(
    samples: list[tuple[float, float]],
) -> None:
    slowdown = fit_slowdown(samples, (30.0, 60.0, 90.0, 120.0))
    values = [slowdown.at(bandwidth) for bandwidth in range(0, 300, 5)]
    assert values[0] == 1.0
    assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_a_slowdown_is_found_again_from_its_own_noisy_samples() -> None:
    true = Slowdown((40.0, 80.0, 120.0), (1.0, 1.4, 2.4))
    rng = random.Random(3)
    samples = [(used, true.at(used) * rng.uniform(0.98, 1.02)) for used in range(0, 160, 2)]
    fitted = fit_slowdown(samples, true.knots)
    assert [fitted.at(used) for used in (20.0, 60.0, 100.0, 150.0)] == pytest.approx(
        [true.at(used) for used in (20.0, 60.0, 100.0, 150.0)], rel=0.03
    )


@pytest.mark.parametrize(
    ("knots", "factors"), [((1.0,), ()), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 2.0), (1.0, 0.9)), ((1.0,), (1.2,))]
)
def test_a_slowdown_that_falls_is_refused(knots: tuple[float, ...], factors: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        Slowdown(knots, factors)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32]), st.floats(0.01, 2.0), min_size=1),
    st.integers(1, 70),
    st.sampled_from([None, 4, 16]),
)
def test_the_best_shape_is_that_of_enumeration(seconds: dict[int, float], items: int, most: int | None) -> None:
    profile = OperationProfile([ShapePoint(shape, taken, 1.0) for shape, taken in seconds.items()])
    allowed = [shape for shape in seconds if most is None or shape <= most] or [min(seconds)]
    best = best_shape(profile, items, most)
    assert best in allowed
    assert math.ceil(items / best) * seconds[best] == min(math.ceil(items / n) * seconds[n] for n in allowed)
    assert best in shapes_to_try(profile, items, most) and len(shapes_to_try(profile, items, most)) <= 3


def test_seconds_between_and_beyond_profiled_shapes_and_of_padded_launches() -> None:
    assert CURVE.seconds(4) == 0.08
    assert CURVE.seconds(6) == pytest.approx(0.14)
    assert CURVE.seconds(16) > CURVE.seconds(8)
    assert CURVE.bandwidth(100) == 30.0
    assert seconds_for(CURVE, 9, 4) == pytest.approx(0.08 * 2 + 0.05)
    padded = OperationProfile(CURVE.points, padded=True)
    assert padded.seconds(3) == 0.08
    assert seconds_for(padded, 9, 4) == pytest.approx(0.08 * 2 + 0.05), "the shape of 1 is compiled too"


def test_profiles_survive_json_and_what_is_no_profile_is_refused() -> None:
    store = ProfileStore(
        {("a/b", "gpu"): OperationProfile(CURVE.points, Slowdown((1.0, 2.0), (1.0, 3.0)), padded=True)}
    )
    text = store.to_json()
    read = ProfileStore.from_json(text)
    assert read.to_json() == text
    found = read.get("a/b", "gpu")
    assert found is not None and found.seconds(3) == 0.08 and found.slowdown.at(3.0) == pytest.approx(5.0)
    for wrong in ("[]", "{", '{"version": 2, "profiles": []}', '{"version": 1}', text.replace('"points"', '"pints"')):
        with pytest.raises(ValueError):
            ProfileStore.from_json(wrong)


def test_what_has_no_profile_is_learnt_and_what_has_one_is_not_overwritten() -> None:
    store = ProfileStore({("a/b", "gpu"): CURVE})
    store.learn("a/b", "gpu", 4, 9.0)
    assert store.get("a/b", "gpu") is CURVE and store.revision == 0
    store.learn("a/c", "gpu", 4, 1.0)
    store.learn("a/c", "gpu", 4, 3.0)
    learnt = store.get("a/c", "gpu")
    assert learnt is not None and learnt.seconds(4) == 2.0 and learnt.seconds(8) == pytest.approx(4.0)
