"""Profiles: shapes by enumeration, seconds beyond what is known, and what is learnt, which is bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.scheduling import GivenProfiles, PaddedProfile
from paceline.workflow.placement import best_shape, seconds_for
from paceline.workflow.profiles import OPERATIONS, SHAPES, WINDOW, OperationProfile, Profiles

CURVE = {1: 0.05, 4: 0.08, 8: 0.2}
KEY = "a/b", "cpu"


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32]), st.floats(0.01, 2.0), min_size=1),
    st.integers(1, 70),
    st.sampled_from([None, 4, 16]),
)
def test_the_best_shape_is_that_of_enumeration(seconds: dict[int, float], items: int, most: int | None) -> None:
    allowed = [shape for shape in seconds if most is None or shape <= most] or [min(seconds)]
    best = best_shape(OperationProfile(seconds), items, most)
    assert best in allowed
    assert math.ceil(items / best) * seconds[best] == min(math.ceil(items / n) * seconds[n] for n in allowed)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.integers(1, 500), st.floats(1e-3, 10.0), min_size=1, max_size=8), st.integers(1, 2000))
def test_seconds_are_those_that_are_known_and_above_0_everywhere(seconds: dict[int, float], items: int) -> None:
    profile = OperationProfile(seconds)
    assert all(profile.seconds(shape) == taken for shape, taken in seconds.items())
    assert profile.seconds(items) > 0.0
    if items > max(seconds):
        assert profile.seconds(items + 1) >= profile.seconds(items)


def test_seconds_between_and_beyond_profiled_shapes_and_of_padded_launches() -> None:
    profile, padded = OperationProfile(CURVE), PaddedProfile(CURVE)
    assert profile.seconds(6) == pytest.approx(0.14)
    assert OperationProfile({4: 1.0}).seconds(8) == pytest.approx(2.0)
    assert seconds_for(profile, 9, 4) == pytest.approx(0.08 * 2 + 0.05)
    assert padded.seconds(3) == 0.08 and padded.seconds(17) == pytest.approx(0.45)
    assert seconds_for(padded, 9, 4) == pytest.approx(0.08 * 2 + 0.05), "the shape of 1 is compiled too"


@pytest.mark.parametrize("wrong", [{}, {0: 1.0}, {1: 0.0}])
def test_what_is_no_profile_is_refused(wrong: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        OperationProfile(wrong)


def test_what_was_given_is_not_learnt_over_and_what_was_not_is_the_median_of_the_newest() -> None:
    known = OperationProfile(CURVE)
    profiles = GivenProfiles({("a/c", "gpu"): known})
    profiles.learn("a/c", "gpu", 4, 9.0)
    assert profiles.get("a/c", "gpu") is known and profiles.revision == 0
    for seconds in (3600.0, 0.5, 0.5, math.nan, -1.0, 0.0, 0.5, 7200.0, 1e300):  # a machine that was suspended
        profiles.learn(*KEY, 4, seconds)
    found = profiles.get(*KEY)
    assert found is not None and found.seconds(4) == 0.5
    for _ in range(WINDOW):
        profiles.learn(*KEY, 4, 2.0)
    found, revision = profiles.get(*KEY), profiles.revision
    assert found is not None and found.seconds(4) == 2.0
    profiles.forget(*KEY)
    assert profiles.get(*KEY) is None and profiles.revision > revision


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 300), st.floats(1e-6, 1e3)), max_size=120))
def test_what_is_known_stays_bounded_whatever_runs(launches: list[tuple[int, int, float]]) -> None:
    profiles = Profiles()
    for number, shape, seconds in launches:
        profiles.learn(f"m{number}/run", "cpu", shape, seconds)
    found = [found for number in range(61) if (found := profiles.get(f"m{number}/run", "cpu")) is not None]
    assert len(found) <= OPERATIONS and all(len(each.shapes) <= SHAPES for each in found)
