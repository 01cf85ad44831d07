"""Haystack: its chat generator whole and streamed, an agent with a tool, and its embedder."""

from __future__ import annotations

import sys
from typing import Any

import checks
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

url, key = sys.argv[1:]
ASKED = [ChatMessage.from_user(checks.QUESTION)]
PARAMETERS = {"type": "object", "properties": {"place": {"enum": checks.PLACES}}, "required": ["place"]}
CALLED: list[str] = []


def generator(**fields: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(model=checks.MODEL, api_base_url=f"{url}/v1", api_key=Secret.from_token(key), **fields)


def hours(place: str) -> str:
    CALLED.append(place)
    return "At 8:30."


def streamed() -> None:
    pieces: list[str] = []
    generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(ASKED)
    checks.opens("".join(pieces))


def agent() -> None:
    tool = Tool("opening_hours", "When a place opens.", PARAMETERS, hours)
    forced = generator(generation_kwargs={"tool_choice": "required"})
    Agent(chat_generator=forced, tools=[tool], exit_conditions=["opening_hours"]).run(messages=ASKED)
    assert CALLED and CALLED[0] in checks.PLACES


def embedded() -> None:
    embedder = OpenAITextEmbedder(model=checks.EMBEDDER, api_base_url=f"{url}/v1", api_key=Secret.from_token(key))
    assert len(embedder.run("a")["embedding"]) == 384


checks.run(
    "haystack-ai",
    {
        "chat": lambda: checks.opens(generator().run(ASKED)["replies"][0].text),
        "stream": streamed,
        "agent with a tool": agent,
        "embedder": embedded,
    },
)
