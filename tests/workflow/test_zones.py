"""Passages of two zones, refined in texts of their own where another side may write: at once, and never mixed up."""

from __future__ import annotations

import pytest

from lab.simulation.workflows import Ran, WorkflowSimulation
from paceline.runtime.units import UnitRegistry
from paceline.workflow.builder import PUBLIC, WORKFLOWS, WorkflowBuilder, WorkflowName, WorkflowSizes, templates
from paceline.workflow.graph import StageGraph
from paceline.workflow.profiling import OperationProfile, ProfileStore, ShapePoint
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import Known

SIZES = WorkflowSizes(question=20, chunks=8, stored=True, far=True, apart=True)
UNITS = UnitRegistry("device", web=True, cloud=True).units
PHASES = ("embed/encode", "rerank/score", "host/search", "far/search", "web/search", "web/fetch")
TEXTS = ("agent/prefill", "agent/decode", "chat/prefill", "chat/decode")


def profiles() -> ProfileStore:
    """The cloud writes three times as fast."""
    seconds = {(operation, unit.kind): 0.02 for operation in PHASES for unit in UNITS}
    seconds |= {(operation, unit.kind): 0.1 if unit.kind == "cloud" else 0.3 for operation in TEXTS for unit in UNITS}
    return ProfileStore({key: OperationProfile([ShapePoint(4, each, 0.0)]) for key, each in seconds.items()})


def searched(workflow: WorkflowName, sizes: WorkflowSizes = SIZES) -> StageGraph:
    """A whole workflow: its question and a sub-question are searched for, and a page of the web."""
    builder, graph = WorkflowBuilder(workflow, sizes), StageGraph()
    graph.add(builder.begin())
    if workflow != "fast":
        graph.add(builder.sub_question(rewritten=False))
        graph.add(builder.sub_question())
    if builder.plan is not None:
        search = builder.web_search(builder.plan)
        graph.add([search])
        graph.add(builder.web_page(search, 6, fetched=True))
    return graph


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("apart", [True, False])
def test_a_public_stage_needs_nothing_private_and_what_reads_private_passages_is_not_called_so(
    workflow: WorkflowName, apart: bool
) -> None:
    sizes = WorkflowSizes(question=20, chunks=8, stored=True, far=True, apart=apart)
    graph = searched(workflow, sizes)
    nodes = list(graph.unfinished())
    for node in nodes:
        if node.stage.partition(".")[0].removesuffix(PUBLIC) in ("rerank", "refine"):
            assert graph.stays_private(node.id) == (PUBLIC not in node.stage), node.stage
    public = sum(node.stage == f"refine{PUBLIC}.decode" for node in nodes)
    assert public == {"fast": 0, "advanced": 2 * apart, "research": 2 * apart + 1}[workflow]


def test_both_texts_of_a_search_are_written_at_once_each_where_it_may() -> None:
    builder = WorkflowBuilder("advanced", SIZES)
    begun = builder.begin()
    assert builder.rewrite is not None
    script = Known(adding={(builder.rewrite, 4): builder.sub_question()})
    scheduler = WorkflowScheduler(UNITS, profiles(), templates())
    simulation = WorkflowSimulation(scheduler, UNITS, profiles(), script)
    simulation.run(begun)

    def of(stage: str) -> list[Ran]:
        return sorted((ran for ran in simulation.ran if ran.sub_stage.stage == stage), key=lambda ran: ran.began)

    private, public = of("refine.decode"), of(f"refine{PUBLIC}.decode")
    assert {ran.launch.unit.split()[0] for ran in private} == {"engine"} and all(ran.private for ran in private)
    assert {ran.launch.unit.split()[0] for ran in public} == {"cloud"} and not any(ran.private for ran in public)
    assert public[0].began < private[0].ended
    read = of("read")[0]
    assert read.began >= max(private[-1].ended, public[-1].ended)


def test_a_search_of_the_other_side_is_expected_once_a_workflow_has_made_one() -> None:
    learnt = templates()["advanced"]
    before = learnt.future("rewrite.decode", lambda *_: 1.0)
    learnt.record_decision("rewrite.decode", ["embed question"])
    assert learnt.future("rewrite.decode", lambda *_: 1.0) == before
    learnt.record_decision("rewrite.decode", ["embed question", "search far"])
    assert learnt.future("rewrite.decode", lambda *_: 1.0) > before
