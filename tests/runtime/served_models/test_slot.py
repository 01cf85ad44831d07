"""The life of one model: loaded once for all who ask, kept while it is used, gone when it is unloaded."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import ConfigError, RequestError
from paceline.runtime.node import Node
from tests.runtime.served_models.loaded_on_demand import OnDemand

pytestmark = pytest.mark.anyio


async def used(model: OnDemand) -> Node:
    async with model.slot.used() as node:
        return node


async def test_a_model_is_loaded_once_for_all_who_ask_together() -> None:
    model = OnDemand()
    assert model.slot.state == "unloaded"
    model.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(used(model)) for _ in range(5)]
        await asyncio.sleep(0)
        assert model.slot.state == "loading"
        model.gate.set()
    assert len({task.result() for task in asking}) == 1
    assert (model.begun, model.slot.state) == (1, "loaded")
    await model.slot.close()


async def test_a_client_that_leaves_does_not_stop_the_loading() -> None:
    model = OnDemand()
    model.gate.clear()
    first, second = (asyncio.create_task(used(model)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    model.gate.set()
    await second
    assert (model.begun, model.slot.idle_s) == (1, 0.0)
    await model.slot.close()


async def test_a_model_is_unloaded_while_nobody_uses_it_and_only_then() -> None:
    model = OnDemand()
    async with model.slot.used():
        model.now = 100.0
        assert model.slot.idle_s is None
        assert not await model.slot.unload()
    model.now = 107.0
    assert model.slot.idle_s == 7.0
    assert await model.slot.unload()
    assert (model.slot.state, model.num_engines()) == ("unloaded", 0)
    assert not await model.slot.unload()
    async with model.slot.used() as node:
        assert (model.begun, node.models()[0].name) == (2, "second")
    await model.slot.close()


async def test_a_model_that_cannot_be_loaded_is_a_503_with_the_reason_and_is_tried_again() -> None:
    model = OnDemand(failure=ConfigError("its folder is gone"))
    for _ in range(2):
        with pytest.raises(RequestError, match="second cannot be loaded now: its folder is gone") as refused:
            await used(model)
        assert refused.value.status == 503
        assert model.slot.state == "unloaded"
    model.failure = None
    async with model.slot.used():
        assert model.begun == 3
    await model.slot.close()


async def test_what_is_asked_while_it_is_being_unloaded_waits_for_its_next_life() -> None:
    model = OnDemand()
    async with model.slot.used() as before:
        pass
    unloading = asyncio.create_task(model.slot.unload())
    await asyncio.sleep(0)
    async with model.slot.used() as after:
        assert after is not before
        assert await unloading
    await model.slot.close()


async def test_a_program_that_ends_ends_a_loading() -> None:
    model = OnDemand()
    model.gate.clear()
    asking = asyncio.create_task(used(model))
    await asyncio.sleep(0)
    await model.slot.close()
    with pytest.raises(RequestError, match="the program ends"):
        await asking
