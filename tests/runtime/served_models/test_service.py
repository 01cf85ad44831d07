"""Several models behind one service: each request is answered by the model it names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import fake_model
from paceline.runtime.node import Node
from paceline.runtime.served_models import ModelMemory, ServedModels
from paceline.runtime.service import Generation, GenerationResult
from tests.requests import a_request, changed
from tests.runtime.served_models.loaded_on_demand import OnDemand

pytestmark = pytest.mark.anyio

REQUEST = a_request(
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


async def text_of(generation: Generation) -> str:
    text = ""
    async for event in generation.run():
        text += "" if isinstance(event, GenerationResult) else event.text
    return text


async def test_each_request_is_answered_by_the_model_it_names() -> None:
    second = OnDemand(seed=7)
    async with served(second) as service:
        assert [model.name for model in service.models()] == ["fake", "second"]
        assert service.model_status("second").state == "unloaded"
        texts = [await text_of(await service.prepare(changed(REQUEST, model=name))) for name in ("", "fake", "second")]
        assert texts[0] == texts[1] != texts[2]
        assert service.model_status("second").state == "loaded"
        assert service.readiness().detail["also_loaded"] == "second"


async def test_a_model_stays_until_its_answer_has_ended_however_it_ends() -> None:
    second = OnDemand()
    async with served(second) as service:
        closed, left, finished = [await service.prepare(changed(REQUEST, model="second")) for _ in range(3)]
        assert second.slot.idle_s is None
        await closed.aclose()
        events = left.run()
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]  # a generator
        assert second.slot.idle_s is None
        await text_of(finished)
        assert second.slot.idle_s == 0.0


async def test_tokens_and_scores_are_of_the_model_that_is_named() -> None:
    second = OnDemand(seed=7)
    async with served(second) as service:
        async with service.of("second") as named, service.of("") as first:
            prompt = await named.tokenize("abc")
            assert await named.token_bytes(prompt) == await first.token_bytes(prompt)
            await named.check(changed(REQUEST, messages=(), tokens=prompt, model="second"), room=1)
            scores = [await model.score(prompt, 0) for model in (first, named)]
        assert scores[0] != scores[1]
        assert second.slot.idle_s == 0.0


async def test_what_was_counted_of_a_model_stays_counted_when_it_is_unloaded() -> None:
    second = OnDemand()
    async with served(second) as service:
        await text_of(await service.prepare(changed(REQUEST, model="second")))
        before = service.load()
        assert before.steps > 0
        assert await second.slot.unload()
        assert service.load().steps == before.steps
        await text_of(await service.prepare(changed(REQUEST, model="second")))
        assert service.load().steps > before.steps


async def test_a_request_that_is_refused_leaves_the_model_idle() -> None:
    second = OnDemand()
    async with served(second) as service:
        with pytest.raises(Exception, match="strategy"):
            await service.prepare(changed(REQUEST, model="second", strategy="no-such"))
        assert second.slot.idle_s == 0.0
