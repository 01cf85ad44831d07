"""OpenAI's Agents SDK: runs over chat completions and responses, a forced tool, conversations kept by the server."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import checks
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
url, key = sys.argv[1:]
CALLED: list[str] = []


@function_tool
def opening_hours(place: Literal["harbour", "library"]) -> str:
    """When a place opens."""
    CALLED.append(place)
    return "At 8:30."


def agent(kind: type[Any], **fields: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    return Agent("reader", model=kind(checks.MODEL, client), **fields)


def answered(kind: type[Any]) -> None:
    checks.opens(asyncio.run(Runner.run(agent(kind), checks.QUESTION)).final_output)


def streamed(kind: type[Any]) -> None:
    async def stream() -> str:
        result = Runner.run_streamed(agent(kind), checks.QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        return str(result.final_output)

    checks.opens(asyncio.run(stream()))


def called(kind: type[Any]) -> None:
    CALLED.clear()
    forced = ModelSettings(tool_choice="opening_hours")
    reader = agent(kind, tools=[opening_hours], model_settings=forced, tool_use_behavior="stop_on_first_tool")
    assert asyncio.run(Runner.run(reader, checks.QUESTION)).final_output == "At 8:30." and CALLED


def conversation() -> None:
    async def talk() -> int:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        made = await client.conversations.create()
        for _ in range(2):
            await Runner.run(agent(OpenAIResponsesModel), checks.QUESTION, conversation_id=made.id)
        return len([item async for item in await client.conversations.items.list(made.id)])

    assert asyncio.run(talk()) >= 4


def session() -> None:
    async def talk() -> int:
        kept = OpenAIConversationsSession(openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=key))
        for _ in range(2):
            await Runner.run(agent(OpenAIResponsesModel), checks.QUESTION, session=kept)
        return len(await kept.get_items())

    assert asyncio.run(talk()) >= 4


checks.run(
    "openai-agents",
    {
        f"{name} {check.__name__}": lambda kind=kind, check=check: check(kind)
        for name, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel))
        for check in (answered, streamed, called)
    }
    | {"conversation_id": conversation, "conversations session": session},
)
