"""The bench of workflows drives the scheduler; its phones are those of the paper's table, its figures repeatable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import workflow
from bench.report import Options
from bench.workflow.cells import Bed, Cell, questions, seconds
from bench.workflow.lengths import DATA_SETS
from bench.workflow.phones import FAMILIES, PHONES, TABLE, fitted_profiles, true_profiles
from bench.workflow_real import STATIC_PUBLIC, WAYS
from paceline.runtime.units import UnitRegistry
from paceline.workflow.flows import FLOWS, WRITE, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import StagesAdded
from paceline.workflow.profiles import Profiles
from paceline.workflow.scheduler import WorkflowScheduler


def test_profiles_have_the_affinities_of_the_paper_and_what_is_fitted_is_near_what_is_true() -> None:
    phone = PHONES["OnePlus 13"]
    true = true_profiles(phone, FAMILIES["Qwen3"], TABLE, 2.0)
    fitted = fitted_profiles(true, seed=1)

    def taken(operation: str, kind: str, items: int) -> float:
        profile = fitted.get(operation, kind)
        assert profile is not None
        assert profile.seconds(items) == pytest.approx(true[operation, kind].profile.seconds(items), rel=0.1)
        return profile.seconds(items)

    assert 8.0 < taken("embed/encode", "gpu", 8) / taken("embed/encode", "npu", 8) < 16.0
    assert taken("chat/decode", "gpu", 8) < taken("chat/decode", "npu", 8)


def test_every_way_is_compared_and_ours_is_ahead_of_single_units_and_fixed_maps_and_figures_are_repeatable() -> None:
    load = replace(workflow.QUICK, workflows=("fast", "advanced"))
    report = workflow.run(Options(quick=True), load)
    assert {str(row["way"]) for row in report.rows} == {way.name for way in workflow.MAIN} | {workflow.BEST_STATIC}
    values = {claim.name: claim.value for claim in report.claims}
    assert values["workflow.vs_gpu_only"] > 3.0
    assert values["workflow.vs_gpu_only_published"] > values["workflow.vs_gpu_only"]
    assert values["workflow.vs_static"] > 1.5 and values["workflow.vs_best_static"] > 1.0
    data_set = DATA_SETS[-1]
    cell = Cell(Bed.of("OnePlus 13", "Qwen3", TABLE, load.contention), "advanced", data_set)
    again = seconds(cell, workflow.WHOLE, questions(data_set, None, load.questions))
    shown = [row for row in report.rows if row | cell.row == row and row["way"] == workflow.OURS]
    assert [row["seconds"] for row in shown] == again


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
