"""Answers of two linked sides where the cloud's model is in stages: their texts are those with its model whole.

Those of one side: `tests/e2e/test_stages.py`.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel, ServedModel
from paceline.engine.loader import EngineOptions, load_model
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest
from tests.requests import a_request
from tests.runtime.stages.rig import DEMO, even_spans, rig
from tests.runtime.test_node import collect, linked

QUESTION = ({"role": "user", "content": "What is the capital of France?"},)


@pytest.fixture(scope="module")
def whole() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(DEMO, dtype="float32", kv_rows=4096)


def requests() -> list[GenerateRequest]:
    return [
        a_request(QUESTION, SamplingParams(temperature=warmth, seed=7), 10, strategy=strategy, owner="anna")
        for strategy in ("aggregate", "draft_verify")
        for warmth in (0.0, 0.9)
    ]


async def answered(node: Node, request: GenerateRequest) -> tuple[str, str, str | None]:
    """Its text, the strategy that wrote it, and what it lacked."""
    text, done = await collect(await node.prepare(request))
    return text, done.strategy, done.degraded


async def texts(cloud_model: ServedModel, device_model: LoadedModel) -> list[tuple[str, str, str | None]]:
    """The answers to every request, asked at the device."""
    async with linked(cloud_model, device_model, within_s=300) as bench:
        return [await answered(bench.device, request) for request in requests()]


@pytest.mark.anyio
async def test_a_target_in_stages_changes_no_text(whole: LoadedModel) -> None:
    device = load_model(DEMO, dtype="float32", kv_rows=4096)
    expected = await texts(whole, device)
    assert all(text and degraded is None for text, _, degraded in expected), expected
    with rig(DEMO, even_spans(6, 2), options=EngineOptions(dtype="float32", kv_rows=4096)) as made:
        assert await texts(ServedModel(made.pipeline, whole.tokenizer), device) == expected
        await asyncio.to_thread(made.pipeline.check)
