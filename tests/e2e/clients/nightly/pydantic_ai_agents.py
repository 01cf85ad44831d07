"""pydantic-ai: an agent over chat completions, responses and Anthropic's messages."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

import checks
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Place(BaseModel):
    name: Literal["harbour", "library"]


url, key = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
MODELS: dict[str, Callable[[], Any]] = {
    "chat": lambda: OpenAIChatModel(checks.MODEL, provider=openai),
    "responses": lambda: OpenAIResponsesModel(checks.MODEL, provider=openai),
    "anthropic": lambda: AnthropicModel(checks.MODEL, provider=AnthropicProvider(base_url=url, api_key=key)),
}


def answered(model: Any) -> None:
    checks.opens(asyncio.run(Agent(model).run(checks.QUESTION)).output)


def streamed(model: Any) -> None:
    async def stream() -> str:
        async with Agent(model).run_stream(checks.QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    checks.opens(asyncio.run(stream()))


def structured(model: Any) -> None:
    place = asyncio.run(Agent(model, output_type=Place).run(checks.QUESTION)).output
    assert place.name in checks.PLACES


found: dict[str, Callable[[], object]] = {}
for name, make in MODELS.items():
    for check in (answered, streamed, structured):
        found[f"{name} {check.__name__}"] = lambda make=make, check=check: check(make())
checks.run("pydantic-ai-slim", found)
