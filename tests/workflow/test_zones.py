"""Passages of two zones, refined in texts of their own where another side may write: at once, and never mixed up."""

from __future__ import annotations

import pytest

from lab.scheduling import GivenProfiles
from lab.simulation.workflows import Ran, Truth, WorkflowSimulation
from paceline.runtime.units import UnitRegistry
from paceline.workflow.flows import FLOWS, JOB, WORKFLOWS, WorkflowName, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import StageGraph
from paceline.workflow.profiles import Key, OperationProfile
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import Known

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
