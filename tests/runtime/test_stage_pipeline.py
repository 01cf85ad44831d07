"""Answers of a node whose model is a pipeline of stages, with several batches under way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

import paceline.models
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, LoadedModel
from paceline.engine.loader import EngineOptions, load_model
from paceline.engine.pipeline_stage import load_stage
from paceline.engine.stage_pipeline import StagePipeline
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest, TextDelta

DEMO = Path(paceline.models.__file__).parent / "device"  # of six layers
OPTIONS = EngineOptions(dtype="float32", kv_rows=4096)
QUESTIONS = ["What is the capital of France?", "Who are you?", "Count to ten.", "Tell me a story about a dog."]


@pytest.fixture
def whole() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(DEMO, dtype="float32", kv_rows=4096)


@pytest.fixture
def staged(whole: LoadedModel) -> Iterator[LoadedModel]:
    pipeline = StagePipeline([load_stage(DEMO, first, first + 2, OPTIONS) for first in (0, 2, 4)])
    yield LoadedModel(cast(Engine, pipeline), whole.tokenizer)
    pipeline.close()


def request(number: int, strategy: str) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number)
    messages = ({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]},)
    return GenerateRequest(messages, sampling, 12, strategy=strategy, owner="anna")


async def texts(model: LoadedModel, requests: list[GenerateRequest]) -> list[str]:
    async with asyncio.timeout(120), Node("cloud", model, None) as node:

        async def answer(asked: GenerateRequest) -> str:
            session = await node.prepare(asked)
            return "".join([event.text async for event in session.run() if isinstance(event, TextDelta)])

        return await asyncio.gather(*map(answer, requests))


@pytest.mark.anyio
async def test_its_answers_are_those_of_the_whole_model(whole: LoadedModel, staged: LoadedModel) -> None:
    requests = [request(number, strategy) for number in range(4) for strategy in ("autoregressive", "lookup_tree")]
    expected = await texts(whole, requests)
    pipeline = cast(StagePipeline, staged.engine)
    assert await texts(staged, requests) == expected and any(expected)
    pipeline.check()
    assert pipeline.free_rows() == 4096, "every answer has released its rows at every stage"
