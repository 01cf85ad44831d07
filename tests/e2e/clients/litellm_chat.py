"""Perform the tasks of tasks.json with LiteLLM and print the results, by task, as one JSON object.

Arguments: the server's URL and a key. Runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it would fetch a list of prices when imported

import litellm

litellm.suppress_debug_info = True

TASKS = json.loads((Path(__file__).parent / "tasks.json").read_text())


def main(url: str, key: str) -> dict[str, object]:
    def ask(**more: Any) -> Any:
        base = TASKS["sampling"] | {"model": f"openai/{TASKS['model']}"}
        messages = [{"role": "user", "content": TASKS["question"]}]
        fields = base | more
        return litellm.completion(
            messages=messages, api_base=f"{url}/v1", api_key=key, num_retries=0, timeout=60, **fields
        )

    long = TASKS["schema_tokens"]
    stream = list(ask(stream=True, stream_options={"include_usage": True}))
    tool = {"type": "function", "function": TASKS["tool"]}
    choice = {"type": "function", "function": {"name": TASKS["tool"]["name"]}}
    schema = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": TASKS["schema"]}}
    pieces = list(ask(max_tokens=long, tools=[tool], tool_choice=choice, stream=True))
    try:
        ask(model="openai/nobody")
        refusal: dict[str, object] = {}
    except litellm.exceptions.NotFoundError as error:
        refusal = {"kind": type(error).__name__, "status": error.status_code}
    logprobs = ask(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    place = {"api_base": f"{url}/v1", "api_key": key, "timeout": 60}
    vectors = litellm.embedding(model=f"openai/{TASKS['embedder']}", input=TASKS["texts"], **place)
    response = litellm.responses(
        model=f"openai/{TASKS['model']}", input=TASKS["question"], **TASKS["response"], **place
    )
    return {
        "embeddings": [each["embedding"] for each in vectors.data],
        "responses": {"text": response.output_text},
        "whole": answer(ask()),
        "streamed": answer(litellm.stream_chunk_builder(stream)),
        "schema": ask(max_tokens=long, response_format=schema).choices[0].message.content,
        "tool": call(ask(max_tokens=long, tools=[tool], tool_choice=choice)),
        "tool_streamed": call(litellm.stream_chunk_builder(pieces)),
        "logprobs": [[each.logprob, each.bytes, len(each.top_logprobs)] for each in logprobs],
        "refusal": refusal,
    }


def answer(whole: Any) -> dict[str, object]:
    choice = whole.choices[0]
    usage = whole.usage.completion_tokens
    return {"text": choice.message.content, "reason": choice.finish_reason, "usage": usage}


def call(whole: Any) -> dict[str, str]:
    (made,) = whole.choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": made.function.arguments}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201  # its answer
