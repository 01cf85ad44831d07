"""Profiles that learn: planted slowdowns are found again, nonsense changes nothing, and memory is bounded."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.workflow.activity import Activity, Overlap, Running, Slowdown
from paceline.workflow.graph import Launch, SubStageId
from paceline.workflow.profiling import (
    BINS,
    KEPT,
    OPERATIONS,
    SHAPES,
    WINDOW,
    ContentionSamples,
    LearningProfiles,
    OperationProfile,
    ShapePoint,
)

PROFILED = {("chat/decode", "engine"): OperationProfile([ShapePoint(1, 0.02, 8.0), ShapePoint(16, 0.32, 8.0)])}
ANY = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ANY | st.floats(1, 200), ANY | st.floats(0.3, 5)), max_size=200))
def test_a_learnt_slowdown_is_at_least_1_and_never_falls_and_its_memory_is_bounded(
    samples: list[tuple[float, float]],
) -> None:
    learnt = ContentionSamples(samples)
    assert len(learnt) <= BINS * KEPT
    values = [learnt.fit().at(1.3**power) for power in range(-40, 60)]
    assert all(1.0 <= value < math.inf for value in values)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(values))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(1.1, 2.0), st.floats(0.3, 2.0))
def test_a_planted_slowdown_is_found_again_from_noise_and_nonsense(seed: int, middle: float, rise: float) -> None:
    """A tenth of the samples is of a clock that stood still or a machine that was suspended."""
    true = Slowdown((20.0, 60.0, 120.0), (1.0, middle, middle + rise))
    rng = random.Random(seed)
    learnt = ContentionSamples()
    for _ in range(1200):
        used = rng.uniform(10.0, 160.0)
        nonsense = rng.random() < 0.1
        learnt.add(used, rng.choice([0.0, 0.26, 30.0, 1e9]) if nonsense else true.at(used) * rng.uniform(0.9, 1.1))
    fitted = learnt.fit()
    for used in (15.0, 40.0, 60.0, 100.0, 140.0):
        assert fitted.at(used) == pytest.approx(true.at(used), rel=0.15)


def test_bins_without_new_samples_are_forgotten_and_new_ones_replace_old_ones() -> None:
    learnt = ContentionSamples((2.0 ** (n / 3 + 0.1), 1.5) for n in range(BINS))
    learnt.add(2.0**-10, 1.0)
    assert len(learnt) == BINS and (2.0**0.1, 1.5) not in list(learnt)
    for factor in (*[3.0] * KEPT, *[2.0] * KEPT):
        learnt.add(50.0, factor)
    assert {factor for used, factor in learnt if used == 50.0} == {2.0}


def test_launches_alone_move_the_seconds_and_those_beside_others_the_slowdown() -> None:
    store = LearningProfiles(PROFILED)
    for n in range(40):
        store.learn("chat/decode", "engine", 16, 0.40)
        store.learn("chat/decode", "engine", 16, 0.40 * 1.8, Overlap(1.0, 24.0 + n / 10))
    found = store.get("chat/decode", "engine")
    assert found is not None
    assert found.seconds(16) == pytest.approx(0.40) and found.seconds(1) == 0.02
    own = found.bandwidth(16)
    assert own == pytest.approx(8.0 * 0.32 / 0.40), "the same bytes in more time"
    assert found.slowdown.at(own) == pytest.approx(1.0, abs=0.02)
    assert found.slowdown.at(own + 25.0) == pytest.approx(1.8, rel=0.05)


def test_a_machine_that_was_suspended_during_launches_does_not_spoil_the_seconds() -> None:
    store = LearningProfiles()
    for seconds in (3600.0, 0.5, 0.5, math.nan, -1.0, 0.0, 0.5, 7200.0, 1e300):
        store.learn("a/b", "cpu", 4, seconds)
    found = store.get("a/b", "cpu")
    assert found is not None and found.seconds(4) == 0.5


def test_what_never_ran_alone_is_replaced_by_the_first_launch_that_does() -> None:
    store = LearningProfiles(demand=lambda *_: 1e9)
    store.learn("a/b", "cpu", 2, 9.0, Overlap(1.0, 5.0))
    assert not store.knows("a/b", "cpu") and LearningProfiles.from_json(store.to_json()).get("a/b", "cpu") is None
    store.learn("a/b", "cpu", 2, 0.5)
    found = store.get("a/b", "cpu")
    assert found is not None and found.seconds(2) == 0.5 and found.bandwidth(2) == pytest.approx(2.0)
    assert store.knows("a/b", "cpu")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 300), st.floats(1e-6, 1e3), st.floats(0, 1), st.floats(0, 100)),
        max_size=120,
    )
)
def test_profiles_survive_json_and_stay_bounded_whatever_runs(
    launches: list[tuple[int, int, float, float, float]],
) -> None:
    store = LearningProfiles(demand=lambda _, __, shape: 1e8 * shape)
    for number, shape, seconds, share, used in launches:
        store.learn(f"m{number}/run", "cpu", shape, seconds, Overlap(share, used))
    assert len(list(store.items())) <= OPERATIONS
    assert all(len(profile.points) <= SHAPES for _, profile in store.items())
    text = store.to_json()
    read = LearningProfiles.from_json(text)
    assert LearningProfiles.from_json(read.to_json()).to_json() == read.to_json()
    for (operation, kind), profile in read.items():
        known = store.get(operation, kind)
        assert known is not None and known.shapes == profile.shapes and known.slowdown == profile.slowdown
        assert [known.seconds(n) for n in known.shapes] == [profile.seconds(n) for n in known.shapes]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 9, "profiles": []}', '{"version": 1, "profiles": [{}]}', '{"version": 1, "profiles": 3}']
    + [
        '{{"version": 1, "profiles": [{{"operation": "a", "unit": "b", "padded": false, "points": [[1, {}, 0]], '
        '"slowdown": [], "samples": {}}}]}}'.format(*pair)
        for pair in (("NaN", "[]"), ("1", "[[1]]"), ("1e999", "[]"), ("1", "7"))
    ],
)
def test_what_is_no_file_of_learnt_profiles_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        LearningProfiles.from_json(text)


def test_a_new_measurement_replaces_what_was_learnt_of_its_operations_alone() -> None:
    store = LearningProfiles(PROFILED)
    store.learn("a/b", "cpu", 1, 3.0)
    revision = store.revision
    store.adopt(LearningProfiles({("chat/decode", "engine"): OperationProfile([ShapePoint(4, 1.0, 2.0)])}))
    found, other = store.get("chat/decode", "engine"), store.get("a/b", "cpu")
    assert found is not None and found.shapes == (4,) and other is not None and other.seconds(1) == 3.0
    assert store.revision > revision
    for _ in range(WINDOW):
        store.learn("chat/decode", "engine", 4, 2.0)
    found = store.get("chat/decode", "engine")
    assert found is not None and found.seconds(4) == 2.0
    store.forget("chat/decode", "engine")
    assert store.get("chat/decode", "engine") is None


def test_a_launch_knows_how_long_others_were_beside_it_and_what_they_asked_for() -> None:
    activity = Activity()

    def begin(number: int, memory: str, bandwidth: float, now: float) -> Running:
        running = Running(
            launch=Launch(number, SubStageId(1), "u", 1, 0, 1),
            memory=memory,
            bandwidth=bandwidth,
            slowdown=Slowdown(),
            transfer_s=0.0,
            compute_s=9.0,
            began=now,
        )
        activity.advance(now)
        activity.add(running)
        return running

    first = begin(1, "host", 4.0, 0.0)
    begin(2, "far", 50.0, 0.0)
    begin(3, "host", 10.0, 2.0)
    activity.advance(3.0)
    activity.remove(3)
    activity.advance(4.0)
    assert first.overlap(4.0) == Overlap(0.25, 2.5)
    assert first.overlap(0.0) == Overlap()
