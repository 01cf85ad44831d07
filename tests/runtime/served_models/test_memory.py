"""Which models are unloaded: those that were idle for long, and the longest idle one where memory is short."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline.errors import EngineError
from paceline.runtime.served_models import ModelMemory
from tests.runtime.served_models.loaded_on_demand import OnDemand

pytestmark = pytest.mark.anyio

ALL = 1600  # bytes


@asynccontextmanager
async def loaded(*models: OnDemand) -> AsyncIterator[ModelMemory]:
    """All of them loaded and idle, in memory that each takes its weights of."""

    def free() -> int:
        return ALL - sum(model.weights for model in models if model.slot.state == "loaded")

    memory = ModelMemory(idle_s=60.0, free=free, total=ALL)
    memory.slots += [model.slot for model in models]
    for model in models:
        async with model.slot.used():
            pass
    yield memory
    for model in models:
        await model.slot.close()


def states(models: Sequence[OnDemand]) -> list[bool]:
    return [model.slot.state == "loaded" for model in models]


async def test_a_model_is_unloaded_after_its_time_without_requests() -> None:
    models = [OnDemand("a"), OnDemand("b")]
    async with loaded(*models) as memory:
        models[0].now, models[1].now = 59.0, 60.0
        await memory.unload_idle()
        assert states(models) == [True, False]


async def test_where_memory_is_short_the_longest_idle_goes_first() -> None:
    models = [OnDemand("a", weights=700), OnDemand("b", weights=850)]
    async with loaded(*models) as memory:
        models[0].now, models[1].now = 2.0, 1.0
        await memory.unload_idle()
        assert states(models) == [False, True]


async def test_room_is_made_for_a_model_and_one_that_is_used_stays() -> None:
    models = [OnDemand("a", weights=500), OnDemand("b", weights=500), OnDemand("c", weights=400)]
    async with loaded(*models[:2]) as memory:
        models[0].now, models[1].now = 9.0, 1.0
        async with models[0].slot.used(), memory.room_for(models[2].slot):
            assert states(models) == [True, True, False], "600 are free, and 500 are needed"
        models[2].slot.weights = 600
        async with models[0].slot.used(), memory.room_for(models[2].slot):
            assert states(models) == [True, False, False]


async def test_a_model_for_which_there_is_no_room_is_refused_with_who_is_in_the_way() -> None:
    models = [OnDemand("a", weights=1000), OnDemand("b", weights=800)]
    async with loaded(models[0]) as memory, models[0].slot.used():
        with pytest.raises(EngineError, match="beside a, in use now"):
            async with memory.room_for(models[1].slot):
                pass
    async with loaded() as memory:
        models[1].slot.weights = ALL
        with pytest.raises(EngineError, match=r"it needs 0\.0 GB of memory, and 0\.0 GB are free\.$"):
            async with memory.room_for(models[1].slot):
                pass
