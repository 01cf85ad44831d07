"""Graphs of stages, profiles of units, and zones of what stages read."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.scheduling import GivenProfiles, PaddedProfile
from lab.simulation.workflows import Ran, Truth, WorkflowSimulation
from paceline.runtime.units import UnitRegistry
from paceline.workflow.flows import FLOWS, JOB, WORKFLOWS, WorkflowName, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import MORE, Need, Request, Stage, StageGraph
from paceline.workflow.placement import best_shape, seconds_for
from paceline.workflow.profiles import OPERATIONS, SHAPES, WINDOW, Key, OperationProfile, Profiles
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import Known, task


def graph_of(*stages: Stage) -> StageGraph:
    graph = StageGraph()
    graph.add(stages)
    return graph


def test_a_stage_can_begin_when_all_it_needs_is_finished() -> None:
    one = task(items=4)
    two = task(one)
    graph = graph_of(one, two)
    assert (graph.available(one), graph.available(two)) == (4, 0)
    assert graph.begin(one, 3) == (0, 3)
    graph.end(one, 3)
    assert (graph.available(one), graph.available(two)) == (1, 0)
    graph.begin(one, 1)
    graph.end(one, 1)
    assert one.progress.finished and graph.available(two) == 1
    assert (one.progress.done, one.progress.running) == (4, 0)


def test_an_ordered_stage_has_one_launch_and_an_open_ended_one_goes_on_until_told() -> None:
    one = task(items=4, operation={"ordered": True, "open_ended": True})
    graph = graph_of(one)
    graph.begin(one, 4)
    assert graph.available(one) == 0
    graph.end(one, 4)
    assert graph.available(one) == MORE and not one.progress.finished, "longer than expected"
    graph.begin(one, 1)
    graph.end(one, 1, done=0, finished=True)
    assert one.progress.finished and one.progress.done == 4


def test_what_an_agent_adds_upstream_holds_back_what_it_feeds() -> None:
    one = task()
    two = task(one)
    graph = graph_of(one, two)
    three = task(feeds=(two,))
    graph.add([three])
    graph.begin(one, 1)
    graph.end(one, 1)
    assert graph.available(two) == 0 and three.progress.followers == [two]
    graph.begin(three, 1)
    graph.end(three, 1)
    assert graph.available(two) == 1


def test_private_inputs_make_private_what_comes_of_them_even_if_added_later_or_emitted_before() -> None:
    one, two = task(private=True), task()
    three, emitted = task(two), task()
    emitted.needs.append(Need(one, "emitted"))
    graph = graph_of(one, two, three, emitted)
    assert [graph.is_private(each) for each in (one, two, three, emitted)] == [True, False, False, True]
    graph.add([task(private=True, feeds=(two,))])
    assert graph.is_private(two) and graph.is_private(three)


def test_a_launch_that_came_to_nothing_is_done_again_with_its_own_items() -> None:
    one = task(items=6)
    graph = graph_of(one)
    assert graph.begin(one, 2) == (0, 2) and graph.begin(one, 2) == (2, 2)
    graph.give_up(one, 0, 2)
    assert graph.begin(one, 4) == (0, 2) and graph.begin(one, 2) == (4, 2)
    assert (one.progress.done, one.progress.running) == (0, 6)


def test_the_number_of_items_is_what_it_turns_out_to_be_until_the_stage_has_begun() -> None:
    one = task(items=6)
    graph = graph_of(one)
    one.resize(0)
    assert graph.available(one) == 1
    one.resize(3)
    graph.begin(one, 1)
    one.resize(9)
    assert graph.available(one) == 2


def test_what_only_a_dropped_stage_wanted_is_dropped_too() -> None:
    one = task()
    two, four = task(one), task(one)
    three = task(two)
    graph = graph_of(one, two, three, four)
    assert set(graph.drop(three)) == {three, two}
    assert graph.available(one) == 1, "the fourth wants it"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda one, _: one,
        lambda _, __: task(task()),
        lambda _, __: task(items=0),
        lambda one, two: task(two, feeds=(one,)),
        lambda _, __: task(feeds=(task(),)),
    ],
    ids=["twice", "unknown need", "no items", "cycle", "unknown fed"],
)
def test_a_wrong_addition_is_refused_and_changes_nothing(wrong: Callable[[Stage, Stage], Stage]) -> None:
    one = task()
    two, other = task(one), task()
    graph = graph_of(one, two)
    with pytest.raises(ValueError):
        graph.add([other, wrong(one, two)])
    assert other not in graph and not two.progress.followers


def test_a_request_that_has_ended_is_forgotten() -> None:
    gone, stays = task(request=Request()), task()
    graph = graph_of(gone, stays)
    assert graph.forget(gone.request) == [gone]
    assert gone not in graph and stays in graph


# ---- profiles -------------------------------------------------------------------------------------------------------
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
    assert profiles.get("a/c", "gpu") is known
    for seconds in (3600.0, 0.5, 0.5, math.nan, -1.0, 0.0, 0.5, 7200.0, 1e300):  # a machine that was suspended
        profiles.learn(*KEY, 4, seconds)
    found = profiles.get(*KEY)
    assert found is not None and found.seconds(4) == 0.5
    for _ in range(WINDOW):
        profiles.learn(*KEY, 4, 2.0)
    found = profiles.get(*KEY)
    assert found is not None and found.seconds(4) == 2.0
    profiles.forget(*KEY)
    assert profiles.get(*KEY) is None


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 300), st.floats(1e-6, 1e3)), max_size=120))
def test_what_is_known_stays_bounded_whatever_runs(launches: list[tuple[int, int, float]]) -> None:
    profiles = Profiles()
    for number, shape, seconds in launches:
        profiles.learn(f"m{number}/run", "cpu", shape, seconds)
    found = [found for number in range(61) if (found := profiles.get(f"m{number}/run", "cpu")) is not None]
    assert len(found) <= OPERATIONS and all(len(each.shapes) <= SHAPES for each in found)


# ---- passages of two zones, refined in texts of their own where another side may write ------------------------------
SIZES = WorkflowSizes(question=20, chunks=8, far=True, apart=True)
UNITS = UnitRegistry("device", web=True, cloud=True).units
PHASES = ("embed/encode", "rerank/score", "host/search", "far/search", "web/search", "web/fetch")
TEXTS = ("agent/prefill", "agent/decode", "chat/prefill", "chat/decode")


def truth() -> dict[Key, Truth]:
    """The cloud writes three times as fast."""
    seconds = {(operation, unit.kind): 0.02 for operation in PHASES for unit in UNITS}
    seconds |= {(operation, unit.kind): 0.1 if unit.kind == "cloud" else 0.3 for operation in TEXTS for unit in UNITS}
    return {key: Truth(OperationProfile({4: each})) for key, each in seconds.items()}


def searched(workflow: WorkflowName, sizes: WorkflowSizes = SIZES) -> StageGraph:
    """A whole workflow: its question and a sub-question are searched for, and a page of the web."""
    stages, graph = WorkflowStages(FLOWS[workflow], sizes), StageGraph()
    graph.add(stages.begin())
    if stages.rewrite is not None:
        graph.add((first := stages.search(rewritten=False)).stages)
        graph.add(stages.search().stages)
        graph.add([stages.jobs_again(first.jobs, 3)] if first.jobs is not None else [])
    if stages.plan is not None:
        search = stages.search_web(stages.plan)
        graph.add([search])
        graph.add(stages.page(search, 6, planned=True).stages)
    return graph


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("apart", [True, False])
def test_a_public_stage_needs_nothing_private_and_what_reads_private_passages_is_not_called_so(
    workflow: WorkflowName, apart: bool
) -> None:
    graph = searched(workflow, WorkflowSizes(question=20, chunks=8, far=True, apart=apart))
    stages = list(graph.unfinished())
    for stage in stages:
        if stage.operation is JOB:
            assert graph.stays_here(stage), stage
        if stage.name.partition(" ")[0] in ("rerank", "refine"):
            assert graph.stays_here(stage) == (not stage.name.endswith(" public")), stage
    public = sum(stage.name == "refine public" for stage in stages)
    refined = {"fast": 0, "advanced": 2 * apart, "research": 2 * apart + 1, "long": 0}[workflow]
    assert public == 2 * refined  # read and written


def test_both_texts_of_a_search_are_written_at_once_each_where_it_may() -> None:
    stages = WorkflowStages(FLOWS["advanced"], SIZES)
    begun = stages.begin()
    assert stages.rewrite is not None
    search = stages.search()
    known, script = GivenProfiles({key: each.profile for key, each in truth().items()}), Known()
    script.adding[stages.rewrite.write, 4] = search.stages
    simulation = WorkflowSimulation(WorkflowScheduler(UNITS, known), UNITS, truth(), script)
    simulation.run(begun)

    def of(stage: object) -> list[Ran]:
        return sorted((ran for ran in simulation.ran if ran.stage is stage), key=lambda ran: ran.began)

    assert search.any is not None and search.any.refine is not None
    assert search.public is not None and search.public.refine is not None
    private, public = of(search.any.refine.write), of(search.public.refine.write)
    assert {ran.launch.unit.split()[0] for ran in private} == {"engine"} and all(ran.private for ran in private)
    assert {ran.launch.unit.split()[0] for ran in public} == {"cloud"} and not any(ran.private for ran in public)
    assert public[0].began < private[0].ended
    assert of(search.read)[0].began >= max(private[-1].ended, public[-1].ended)
