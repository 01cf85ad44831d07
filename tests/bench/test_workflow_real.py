"""The bench of served workflows: what its agents decide, what is asked, and how its ratios are made."""

from __future__ import annotations

from bench.workflow.program import EVERY, ScriptedQueries
from bench.workflow.town import documents, questions
from bench.workflow_real import (
    ALONE,
    ONE_TEXT,
    OURS,
    STATIC,
    STATIC_ASKING,
    STATIC_PUBLIC,
    WAYS,
    Answered,
    Workload,
    _claims,
)
from paceline.runtime.units import UnitRegistry
from paceline.workflow.flows import FLOWS, WRITE, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import StagesAdded
from paceline.workflow.profiles import Profiles
from paceline.workflow.scheduler import WorkflowScheduler


def test_scripted_agents_decide_as_their_text_goes_on_and_the_rest_at_its_end() -> None:
    parser = ScriptedQueries(["one", "two", "three"])
    assert parser.feed("x" * (EVERY - 1)) == []
    assert parser.feed("x") == ["one"]
    assert not parser.done
    assert parser.end() == ["two", "three"]
    assert parser.end() == []


def test_each_question_needs_both_sides() -> None:
    texts = documents()
    for asked in questions():
        town = asked.question.removeprefix("When was the founder of the museum of ").removesuffix(" born?")
        assert f"The museum of {town} was founded by" in texts["device"]
        born = asked.script["rewrite"][1].removeprefix("When was ").removesuffix(" born?")
        assert f"{born} was born in" in texts["cloud"]


def test_a_claim_is_the_median_of_ratios_within_rounds_against_the_best_map() -> None:
    seconds = {OURS: [1.0, 2.0, 4.0], ONE_TEXT: [1.0, 1.0, 1.0], ALONE: [3.0, 4.0, 8.0]}
    seconds |= {STATIC: [2.0, 4.0, 4.0], STATIC_ASKING: [3.0, 6.0, 12.0], STATIC_PUBLIC: [1.5, 3.0, 6.0]}
    taken = {("advanced", name): [Answered(each, "", {}, 0) for each in row] for name, row in seconds.items()}
    assert {way.name for way in WAYS} == set(seconds)
    claims = {claim.name: claim.value for claim in _claims(taken, Workload(workflows=("advanced",)))}
    assert claims == {"workflow.real_vs_static_advanced": 1.5, "workflow.real_vs_single_advanced": 2.0}


def test_the_last_map_sends_every_text_to_the_cloud_that_reads_nothing_private() -> None:
    """So that a static map lacks no stage that the scheduler could place better."""
    stages = WorkflowStages(FLOWS["research"], WorkflowSizes(question=8, chunks=4, far=True, apart=True))
    machine = WorkflowScheduler(UnitRegistry("device", web=True, cloud=True).units, Profiles())
    machine.on(StagesAdded(0.0, stages.begin()))
    machine.on(StagesAdded(0.0, stages.search().stages))
    texts = [stage for stage in machine.graph.unfinished() if stage.operation.model == WRITE.model]
    may = {stage.name for stage in texts if not machine.graph.stays_here(stage)}
    (way,) = (way for way in WAYS if way.name == STATIC_PUBLIC)
    assert {stage for stage, unit in (way.policy.static_map or {}).items() if unit == "cloud"} == may
