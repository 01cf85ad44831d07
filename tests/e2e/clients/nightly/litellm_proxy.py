"""LiteLLM's proxy, started here with this server behind it: what its own clients get through it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checks
import httpx

url, key = sys.argv[1:]
ASKED = {"model": checks.MODEL, "messages": [{"role": "user", "content": checks.QUESTION}], "temperature": 0}
BEHIND = {"api_base": f"{url}/v1", "api_key": key}
MODELS = [
    {"model_name": checks.MODEL, "litellm_params": {"model": f"openai/{checks.MODEL}", **BEHIND}},
    {"model_name": "by-vllm", "litellm_params": {"model": f"hosted_vllm/{checks.MODEL}", **BEHIND}},
    {"model_name": checks.EMBEDDER, "litellm_params": {"model": f"openai/{checks.EMBEDDER}", **BEHIND}},
    {"model_name": "text", "litellm_params": {"model": f"text-completion-openai/{checks.MODEL}", **BEHIND}},
]


@contextmanager
def proxy(folder: Path) -> Iterator[httpx.Client]:
    """A client of a proxy that runs until the end."""
    config = folder / "config.yaml"
    config.write_text(json.dumps({"model_list": MODELS, "general_settings": {"master_key": "sk-proxy"}}))
    given = {"health": "/health/liveliness", "environment": {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}}
    headers = {"authorization": "Bearer sk-proxy"}
    with checks.served(folder, "litellm", "--config", str(config), **given, headers=headers) as client:
        yield client


def posted(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text[:200]
    return answer.json()


def streamed(client: httpx.Client) -> None:
    text = client.post("/v1/chat/completions", json=ASKED | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = (choice["delta"] for chunk in chunks for choice in chunk["choices"])
    checks.opens("".join(delta.get("content") or "" for delta in deltas))
    assert text.rstrip().endswith("[DONE]")


def called(client: httpx.Client) -> None:
    shape = {"type": "object", "properties": {"place": {"enum": checks.PLACES}}, "required": ["place"]}
    tool = {"type": "function", "function": {"name": "opening_hours", "parameters": shape}}
    forced = {"type": "function", "function": {"name": "opening_hours"}}
    answer = posted(client, "/v1/chat/completions", **ASKED, tools=[tool], tool_choice=forced)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["place"] in checks.PLACES


def anthropic(client: httpx.Client) -> None:
    said = posted(client, "/v1/messages", **ASKED, max_tokens=64)
    checks.opens("".join(block.get("text", "") for block in said["content"]))


def too_long(client: httpx.Client) -> None:
    long = {"model": checks.MODEL, "messages": [{"role": "user", "content": "a word and " * 20_000}]}
    refused = client.post("/v1/chat/completions", json=long)
    assert refused.status_code == 400 and "ContextWindowExceeded" in refused.text, refused.text[:200]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, proxy(Path(folder)) as client:
        checks.run(
            "litellm",
            {
                "chat": lambda: checks.opens(
                    posted(client, "/v1/chat/completions", **ASKED)["choices"][0]["message"]["content"]
                ),
                "stream": lambda: streamed(client),
                "hosted_vllm": lambda: checks.opens(
                    posted(client, "/v1/chat/completions", **ASKED | {"model": "by-vllm"})["choices"][0]["message"][
                        "content"
                    ]
                ),
                "tool": lambda: called(client),
                "responses": lambda: posted(client, "/v1/responses", model=checks.MODEL, input=checks.QUESTION),
                "messages": lambda: anthropic(client),
                "completions": lambda: posted(client, "/v1/completions", model="text", prompt="The library opens"),
                "embeddings": lambda: posted(client, "/v1/embeddings", model=checks.EMBEDDER, input="a"),
                "too long": lambda: too_long(client),
            },
        )


if __name__ == "__main__":
    main()
