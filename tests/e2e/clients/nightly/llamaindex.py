"""LlamaIndex: its models of OpenAI's and Ollama's APIs, embeddings, and an agent with a tool. Its model of Anthropic's
API refuses names that it does not know before it sends anything."""

import asyncio
import sys
from typing import Any, Literal

import checks
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

url, key = sys.argv[1:]
HEADERS = {"authorization": f"Bearer {key}"}
like = OpenAILike(
    checks.MODEL, api_base=f"{url}/v1", api_key=key, is_chat_model=True, is_function_calling_model=True, max_retries=0
)
ollama = Ollama(checks.MODEL, base_url=url, client=None, headers=HEADERS, context_window=2048)
ASKED = [ChatMessage(role="user", content=checks.QUESTION)]


def streamed(model: Any) -> None:
    *_, last = model.stream_chat(ASKED)
    checks.opens(last.message.content)


CALLED: list[str] = []


def opening_hours(place: Literal["harbour", "library"]) -> str:
    """When a place opens."""
    CALLED.append(place)
    return "At 8:30."


def agent() -> None:
    async def ask() -> None:
        await FunctionAgent(tools=[opening_hours], llm=like, initial_tool_choice="opening_hours").run(checks.QUESTION)

    asyncio.run(ask())
    assert CALLED


def embedded() -> None:
    openai_like = OpenAILikeEmbedding(model_name=checks.EMBEDDER, api_base=f"{url}/v1", api_key=key)
    ollamas = OllamaEmbedding(checks.EMBEDDER, base_url=url, client_kwargs={"headers": HEADERS})
    one, other = openai_like.get_text_embedding("a"), ollamas.get_text_embedding("a")
    assert len(one) == len(other) == 384 and all(abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True))


checks.run(
    "llama-index-core",
    {
        f"{name} {way}": check
        for name, model in (("openai", like), ("ollama", ollama))
        for way, check in (
            ("chat", lambda model=model: checks.opens(model.chat(ASKED).message.content)),
            ("stream", lambda model=model: streamed(model)),
        )
    }
    | {"agent with a tool": agent, "embeddings": embedded},
)
