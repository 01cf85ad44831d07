"""Models that are loaded on demand: one load for all who ask, room in memory, and joining the other side."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock
from weakref import WeakSet

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.fake import FakeEngine, fake_model
from paceline.errors import ConfigError, EngineError, PacelineError, RequestError, StorageError
from paceline.runtime.node import Node
from paceline.runtime.resources import Company, NodeParts, Offer
from paceline.runtime.served_models import ModelMemory, ModelSlot, ServedModels
from tests.requests import a_request, changed
from tests.runtime.test_node import REQUEST, collect, nodes, stores_of

pytestmark = pytest.mark.anyio


@dataclass
class OnDemand:
    name: str = "second"
    seed: int = 1
    weights: int = 0
    now: float = 0.0  # s, virtual
    failure: PacelineError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0  # loadings
    engines: WeakSet[FakeEngine] = field(default_factory=WeakSet)

    def __post_init__(self) -> None:
        self.gate.set()
        info = replace(fake_model(self.seed).engine.info, name=self.name)
        self.slot = ModelSlot(info, self._open, weights=self.weights, now=lambda: self.now)

    def num_engines(self) -> int:
        """Engines in memory."""
        gc.collect()
        return len(self.engines)

    async def _open(self, slot: ModelSlot) -> Node:
        self.begun += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        engine = FakeEngine(self.seed)
        self.engines.add(engine)
        return Node(
            "cloud", LoadedModel(engine, fake_model().tokenizer), None, NodeParts(offer=Offer(name=slot.info.name))
        )


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


async def test_a_node_that_cannot_begin_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stores_of(tmp_path, {"cloud": {"keys.md": "The key is under the broom."}}) as stores:
        before = set(threading.enumerate())
        monkeypatch.setattr(stores["cloud"], "count", Mock(side_effect=StorageError("the database is away")))
        with pytest.raises(StorageError):
            async with Node("cloud", fake_model(), stores["cloud"], NodeParts()):
                raise AssertionError("it has begun")
        assert not [each.name for each in set(threading.enumerate()) - before if each.name == "paceline-engine"]


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


# ---- which models are unloaded --------------------------------------------------------------------------------------
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


async def test_where_no_model_is_idle_memory_is_not_looked_at() -> None:
    def unreadable() -> int:
        raise OSError(24, "Too many open files")

    await ModelMemory(idle_s=60.0, free=unreadable, total=ALL).unload_idle()


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


# ---- nodes of further models beside a linked one --------------------------------------------------------------------
async def test_a_model_that_was_there_before_the_link_joins_and_is_told_of_its_loss() -> None:
    async with nodes(linked=False) as (bench, tasks):
        further = Node("device", fake_model(7), None, first=bench.device)
        async with further:
            await bench.link(tasks)
            text, done = await collect(await further.prepare(REQUEST))
            first, _ = await collect(await bench.device.prepare(REQUEST))
            assert (done.strategy, done.degraded) == ("aggregate", None)
            assert text != first
            cut = await further.prepare(REQUEST)
            events = cut.run()
            await anext(events)
            await bench.unlink()
            last = [event async for event in events][-1]
            assert getattr(last, "degraded", None) == "cloud_lost"


async def test_a_model_that_has_gone_is_told_of_no_link_any_more() -> None:
    async with nodes() as (bench, _):
        async with Node("device", fake_model(7), None, first=bench.device) as further:
            await collect(await further.prepare(REQUEST))
        _, done = await collect(await bench.device.prepare(REQUEST))
        assert (done.strategy, done.degraded) == ("aggregate", None), "the link is the first node's"


async def test_a_model_with_another_tokenizer_writes_alone_and_says_why() -> None:
    async with nodes() as (bench, _):
        parts, why = NodeParts(company=Company(expects_peer=lambda: True)), "it has another tokenizer"
        async with Node("device", fake_model(7), None, parts, first=bench.device, alone=lambda: why) as further:
            _, done = await collect(await further.prepare(REQUEST))
            assert done.strategy_reason == "the cloud is not asked: it has another tokenizer"
            assert done.degraded == "cloud_refused"
            with pytest.raises(RequestError, match="The cloud takes no part: it has another tokenizer") as refused:
                await further.prepare(changed(REQUEST, on_loss="fail"))
            assert refused.value.code == "model_writes_alone"


# ---- several models behind one service ------------------------------------------------------------------------------
SHORT = a_request(
    messages=({"role": "user", "content": "Where is the key?"},),
    sampling=SamplingParams(temperature=0.0, seed=5),
    max_tokens=12,
)


@asynccontextmanager
async def served(*further: OnDemand) -> AsyncIterator[ServedModels]:
    memory = ModelMemory(idle_s=60.0, free=lambda: 1 << 40, total=1 << 40)
    memory.slots += [model.slot for model in further]
    async with Node("cloud", fake_model(), None) as node, ServedModels(node, memory) as service:
        yield service


async def test_each_request_is_answered_by_the_model_it_names() -> None:
    second = OnDemand(seed=7)
    async with served(second) as service:
        assert [model.name for model in service.models()] == ["fake", "second"]
        assert service.model_status("second").state == "unloaded"
        asked = [await service.prepare(changed(SHORT, model=name)) for name in ("", "fake", "second")]
        texts = [(await collect(each))[0] for each in asked]
        assert texts[0] == texts[1] != texts[2]
        assert service.model_status("second").state == "loaded"
        assert service.readiness().detail["also_loaded"] == "second"


async def test_a_model_stays_until_its_answer_has_ended_however_it_ends() -> None:
    second = OnDemand()
    async with served(second) as service:
        closed, left, finished = [await service.prepare(changed(SHORT, model="second")) for _ in range(3)]
        assert second.slot.idle_s is None
        await closed.aclose()
        events = left.run()
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]  # a generator
        assert second.slot.idle_s is None
        await collect(finished)
        assert second.slot.idle_s == 0.0


async def test_tokens_and_scores_are_of_the_model_that_is_named() -> None:
    second = OnDemand(seed=7)
    async with served(second) as service:
        async with service.of("second") as named, service.of("") as first:
            prompt = await named.tokenize("abc", "")
            assert await named.token_bytes(prompt, "") == await first.token_bytes(prompt, "")
            await named.check(changed(SHORT, messages=(), tokens=prompt, model="second"), room=1)
            scores = [await model.score(prompt, 0) for model in (first, named)]
        assert scores[0] != scores[1]
        assert second.slot.idle_s == 0.0


async def test_a_request_that_is_refused_leaves_the_model_idle() -> None:
    second = OnDemand()
    async with served(second) as service:
        with pytest.raises(Exception, match="strategy"):
            await service.prepare(changed(SHORT, model="second", strategy="no-such"))
        assert second.slot.idle_s == 0.0
