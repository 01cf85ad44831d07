"""Perform the tasks of tasks.json with Ollama's client and print the results, by task, as one JSON object.

Arguments: the server's URL and a key. Runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ollama

TASKS = json.loads((Path(__file__).parent / "tasks.json").read_text())
MESSAGES = [{"role": "user", "content": TASKS["question"]}]
SAMPLING = TASKS["sampling"]
OPTIONS = {"temperature": SAMPLING["temperature"], "seed": SAMPLING["seed"], "num_predict": SAMPLING["max_tokens"]}
LONG = OPTIONS | {"num_predict": TASKS["schema_tokens"]}


def main(url: str, key: str) -> dict[str, object]:
    client = ollama.Client(host=url, headers={"authorization": f"Bearer {key}"}, timeout=60)
    model, question = TASKS["model"], TASKS["question"]
    whole = client.chat(model, messages=MESSAGES, options=OPTIONS)
    streamed = list(client.chat(model, messages=MESSAGES, options=OPTIONS, stream=True))
    tools = [{"type": "function", "function": TASKS["tool"]}]
    called = client.chat(model, messages=MESSAGES, options=LONG, tools=tools)
    called_streamed = list(client.chat(model, messages=MESSAGES, options=LONG, tools=tools, stream=True))
    generated = client.generate(model, question, options=OPTIONS)
    pieces = list(client.generate(model, question, options=OPTIONS, stream=True))
    raw = client.generate(model, question, raw=True, options=OPTIONS)
    schema = client.chat(model, messages=MESSAGES, options=LONG, format=TASKS["schema"])
    try:
        client.chat("nobody", messages=MESSAGES)
        refusal: dict[str, object] = {}
    except ollama.ResponseError as error:
        refusal = {"status": error.status_code, "text": error.error}
    return {
        "whole": answer(whole),
        "streamed": answer(streamed[-1]) | {"text": "".join(part.message.content or "" for part in streamed)},
        "calls": calls([called]),
        "calls_streamed": calls(called_streamed),
        "generated": generated.response,
        "generated_streamed": "".join(piece.response for piece in pieces),
        "completions": raw.response,
        "schema": schema.message.content,
        "embeddings": client.embed(TASKS["embedder"], TASKS["texts"]).embeddings,
        "models": [each.model for each in client.list().models],
        "context": (client.show(model).modelinfo or {}).get("paceline.context_length"),
        "refusal": refusal,
    }


def answer(response: Any) -> dict[str, object]:
    return {"text": response.message.content, "reason": response.done_reason, "usage": response.eval_count}


def calls(responses: list[Any]) -> list[dict[str, object]]:
    made = [call.function for response in responses for call in response.message.tool_calls or ()]
    return [{"name": call.name, "arguments": dict(call.arguments)} for call in made]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201  # its answer
