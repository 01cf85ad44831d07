"""LangChain's models of Anthropic's and Ollama's APIs: whole, streamed, with a tool, structured."""

from __future__ import annotations

import sys
from typing import Any, Literal

import checks
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings

url, key = sys.argv[1:]
HEADERS = {"headers": {"authorization": f"Bearer {key}"}}
anthropic = ChatAnthropic(model=checks.MODEL, base_url=url, api_key=key, max_tokens=64, max_retries=0)
ollama = ChatOllama(model=checks.MODEL, base_url=url, client_kwargs=HEADERS)


@tool
def opening_hours(place: Literal["harbour", "library"]) -> str:
    """When a place opens."""
    return f"The {place} opens at 8:30."


def streamed(model: Any) -> None:
    whole = None
    for chunk in model.stream(checks.QUESTION):
        whole = chunk if whole is None else whole + chunk
    checks.opens(whole.text)
    assert whole.usage_metadata["output_tokens"] > 0


def called() -> None:
    (call,) = anthropic.bind_tools([opening_hours], tool_choice="opening_hours").invoke(checks.QUESTION).tool_calls
    assert call["args"]["place"] in checks.PLACES


def schema() -> None:
    shape = {
        "title": "place",
        "type": "object",
        "properties": {"place": {"enum": checks.PLACES}},
        "required": ["place"],
    }
    found = ollama.with_structured_output(shape, method="json_schema").invoke(checks.QUESTION)
    assert found["place"] in checks.PLACES


checks.run(
    "langchain-core",
    {
        "anthropic": lambda: checks.opens(anthropic.invoke(checks.QUESTION).text),
        "anthropic stream": lambda: streamed(anthropic),
        "anthropic tool": called,
        "ollama": lambda: checks.opens(ollama.invoke(checks.QUESTION).text),
        "ollama stream": lambda: streamed(ollama),
        "ollama schema": schema,
        "ollama embeddings": lambda: OllamaEmbeddings(
            model=checks.EMBEDDER, base_url=url, client_kwargs=HEADERS
        ).embed_query("a"),
    },
)
