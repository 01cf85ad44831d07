"""The observed graph: what can begin, what belongs to whom, what agents add later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.workflow.graph import MORE, Need, Request, Stage, StageGraph
from tests.workflow.made import task


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
