"""The bench of served workflows: what its agents decide, what is asked, and how its ratios are made."""

from __future__ import annotations

from bench.workflow_real import STATIC_PUBLIC, WAYS
from paceline.runtime.units import UnitRegistry
from paceline.workflow.flows import FLOWS, WRITE, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import StagesAdded
from paceline.workflow.profiles import Profiles
from paceline.workflow.scheduler import WorkflowScheduler


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
