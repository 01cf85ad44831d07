"""The observed graph: what can begin, what belongs to whom, what agents add later."""

from __future__ import annotations

import pytest

from paceline.workflow.graph import MORE, Dependency, StageGraph, SubStage, SubStageId
from tests.workflow.made import task

ONE, TWO, THREE = SubStageId(1), SubStageId(2), SubStageId(3)


def flowing(number: int, on: int, items: int) -> SubStage:
    return SubStage(SubStageId(number), "s", "m", "run", items, (Dependency(SubStageId(on), "flow"),))


def test_a_sub_stage_can_begin_when_all_it_needs_is_finished() -> None:
    graph = StageGraph()
    graph.add([task(1, items=4), task(2, 1)])
    assert (graph.available(ONE), graph.available(TWO)) == (4, 0)
    assert graph.begin(ONE, 3) == (0, 3)
    graph.end(ONE, 3)
    assert (graph.available(ONE), graph.available(TWO)) == (1, 0)
    graph.begin(ONE, 1)
    graph.end(ONE, 1)
    assert graph.is_finished(ONE) and graph.available(TWO) == 1
    graph.check()


@pytest.mark.parametrize(("whole", "after_half"), [(False, 3), (True, 0)])
def test_a_flow_follows_as_far_as_data_is_there_unless_stages_are_whole(whole: bool, after_half: int) -> None:
    graph = StageGraph(whole_stages=whole)
    graph.add([task(1, items=4), flowing(2, 1, 6)])
    graph.begin(ONE, 2)
    assert graph.available(TWO) == 0
    graph.end(ONE, 2)
    assert graph.available(TWO) == after_half


def test_an_ordered_sub_stage_has_one_launch_and_an_open_ended_one_goes_on_until_told() -> None:
    graph = StageGraph()
    graph.add([task(1, items=4, ordered=True, open_ended=True)])
    graph.begin(ONE, 4)
    assert graph.available(ONE) == 0
    graph.end(ONE, 4)
    assert graph.available(ONE) == MORE and not graph.is_finished(ONE), "longer than expected"
    graph.begin(ONE, 1)
    graph.end(ONE, 1, done=0, finished=True)
    assert graph.is_finished(ONE) and graph.done(ONE) == 4


def test_what_an_agent_adds_upstream_holds_back_what_it_feeds() -> None:
    graph = StageGraph()
    graph.add([task(1, decides=True), task(2, 1)])
    graph.add([task(3, feeds=(TWO,))])
    graph.begin(ONE, 1)
    graph.end(ONE, 1)
    assert graph.available(TWO) == 0 and list(graph.followers(THREE)) == [TWO]
    graph.begin(THREE, 1)
    graph.end(THREE, 1)
    assert graph.available(TWO) == 1


def test_private_inputs_make_private_what_comes_of_them_even_if_added_later_or_emitted_before() -> None:
    graph = StageGraph()
    emitted = SubStage(SubStageId(4), "s", "m", "run", 1, (Dependency(ONE, "emitted"),))
    graph.add([task(1, private=True), task(2), task(3, 2), emitted])
    assert [graph.is_private(SubStageId(i)) for i in (1, 2, 3, 4)] == [True, False, False, True]
    graph.add([task(5, private=True, feeds=(TWO,))])
    assert graph.is_private(TWO) and graph.is_private(THREE)


def test_a_launch_that_came_to_nothing_is_done_again_with_its_own_items() -> None:
    graph = StageGraph()
    graph.add([task(1, items=6)])
    assert graph.begin(ONE, 2) == (0, 2) and graph.begin(ONE, 2) == (2, 2)
    graph.give_up(ONE, 0, 2)
    assert graph.begin(ONE, 4) == (0, 2) and graph.begin(ONE, 2) == (4, 2)
    graph.check()


def test_what_only_a_dropped_sub_stage_wanted_is_dropped_too() -> None:
    graph = StageGraph()
    graph.add([task(1), task(2, 1), task(3, 2), task(4, 1)])
    assert set(graph.drop(THREE)) == {THREE, TWO}
    assert graph.available(ONE) == 1, "the fourth wants it"


@pytest.mark.parametrize(
    "wrong",
    [
        [task(1)],
        [task(5, 9)],
        [task(5, items=0)],
        [task(5, 2, feeds=(ONE,))],
        [task(5, feeds=(SubStageId(9),))],
        [task(5, group=0)],
    ],
    ids=["twice", "unknown need", "no items", "cycle", "unknown fed", "no group"],
)
def test_a_wrong_addition_is_refused_and_changes_nothing(wrong: list[SubStage]) -> None:
    graph = StageGraph()
    graph.add([task(1), task(2, 1)])
    with pytest.raises(ValueError):
        graph.add([task(8), *wrong])
    assert SubStageId(8) not in graph and not list(graph.followers(TWO))


def test_a_request_that_has_ended_is_forgotten() -> None:
    graph = StageGraph()
    graph.add([task(1, request=7), task(2)])
    graph.begin(ONE, 1)
    graph.end(ONE, 1)
    assert [(node.id, done) for node, done in graph.forget(7)] == [(ONE, 1)]
    assert ONE not in graph and TWO in graph
