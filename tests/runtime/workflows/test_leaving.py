"""Workflows that are left or refused give their units back, and those that may not search ask nobody."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import PacelineError, RequestError
from paceline.runtime import admission
from paceline.runtime.units import NodeUnits, UnitRegistry
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.run import WorkflowRun
from paceline.workflow.flows import FLOWS, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import Launch, Outcome, Stage
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes
from tests.runtime.workflows.test_run import ASKED, KEY, Models, ScriptedPlaces

pytestmark = pytest.mark.anyio


async def test_refused_answers_hold_no_lane() -> None:
    """More of them than there are lanes, then one that is written."""
    driver = WorkflowDriver(UnitRegistry("device"))
    for _ in range(6):
        run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, Models(fault="answer").admit)
        with pytest.raises(RequestError, match="no room"):
            await collect(run)
    run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, Models().admit)
    async with asyncio.timeout(30):
        await collect(run)
    await driver.close()


async def test_a_launch_that_is_cancelled_before_its_first_step_gives_its_unit_back() -> None:
    driver = WorkflowDriver(UnitRegistry("device", NodeUnits(lanes=1)))
    launched: list[int] = []

    async def work(launch: Launch) -> Outcome:
        launched.append(launch.id)
        return Outcome(finished=True)

    def begun() -> list[Stage]:
        stages = WorkflowStages(FLOWS["advanced"], WorkflowSizes(question=4, chunks=4)).begin()
        for stage in stages:
            stage.run = work
        return stages

    for _ in range(2):
        stages = begun()
        driver.begin(stages[0].request, stages, lambda _: None)
        driver.cancel(stages[0].request)
    assert not launched
    ended = asyncio.Event()
    stages = begun()
    driver.begin(stages[0].request, stages, lambda _: ended.set())
    async with asyncio.timeout(30):
        await ended.wait()
    await driver.close()


async def test_a_workflow_ends_with_the_program() -> None:
    driver, models = WorkflowDriver(UnitRegistry("device")), Models(hold="rewrite")
    reading = asyncio.create_task(collect(WorkflowRun(ASKED, ScriptedPlaces(), driver, models.admit)))
    await models.holding.wait()
    await driver.close()
    with pytest.raises(PacelineError, match="shutting down"):
        async with asyncio.timeout(30):
            await reading


async def test_a_workflow_that_waits_takes_a_place_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 1)
    async with nodes(linked=False) as (bench, _):
        asked = changed(REQUEST, workflow="fast", strategy="auto")
        waiting = await bench.device.prepare(asked)
        with pytest.raises(RequestError, match="of 1 at most"):
            await bench.device.prepare(asked)
        await waiting.aclose()
        await waiting.aclose()
        _, done = await collect(await bench.device.prepare(asked))
        assert done.degraded is None
        await (await bench.device.prepare(asked)).aclose()
