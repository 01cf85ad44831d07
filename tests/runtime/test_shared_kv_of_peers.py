"""KV of answers that a device opens at its cloud: kept while the link is away, shared by one client's answers alone."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.runtime.service import GenerationResult, TextDelta
from tests.requests import a_request, changed
from tests.runtime.test_node import Bench, collect, nodes

pytestmark = pytest.mark.anyio

LONG = "Where is the key to the old red boat, which my neighbour left in the harbour behind the mill last autumn?"
REQUEST = a_request(
    messages=({"role": "user", "content": LONG},),
    sampling=SamplingParams(temperature=1.0, seed=5, logit_bias={256: -100.0}),
    max_tokens=40,
    strategy="draft_verify",
    documents=0,
    owner="ann",
)
BLOCK = 16  # rows; what does not fill one is computed again


def adopted(bench: Bench) -> int:
    """Rows that the cloud has not had to compute."""
    return bench.cloud.worker.steps.prefixes.adopted


async def test_an_answer_whose_link_was_lost_goes_on_without_another_prefill() -> None:
    async with nodes() as (bench, _):
        whole, _ = await collect(await bench.device.prepare(changed(REQUEST, owner="bert")))
    async with nodes(gated=("cloud",)) as (bench, tasks):
        cloud = bench.engines["cloud"]
        events = (await bench.device.prepare(changed(REQUEST, on_loss="pause"))).run()
        text = ""
        while len(text) < 8:
            cloud.gate.release()
            event = await anext(events)
            assert isinstance(event, TextDelta)
            text += event.text
        await bench.unlink()
        while cloud.held():  # the cloud's part has ended, its sequences are released
            cloud.gate.release()
            await asyncio.sleep(0)
        assert adopted(bench) == 0
        cloud.release_gate()
        await bench.link(tasks)
        async for event in events:
            text += event.text if isinstance(event, TextDelta) else ""
            if isinstance(event, GenerationResult):
                assert event.degraded is None and event.stats["alone"] == 0
        assert text == whole
        assert adopted(bench) >= len(LONG) // BLOCK * BLOCK


async def test_a_client_s_next_answer_shares_and_no_other_client_s() -> None:
    async with nodes() as (bench, _):
        first, _ = await collect(await bench.device.prepare(REQUEST))
        assert adopted(bench) == 0
        await collect(await bench.device.prepare(changed(REQUEST, owner="bert")))
        assert adopted(bench) == 0
        again, _ = await collect(await bench.device.prepare(REQUEST))
        assert again == first and adopted(bench) >= len(LONG) // BLOCK * BLOCK
