"""Perform the tasks of tasks.json with Anthropic's client and print the results, by task, as one JSON object.

Arguments: the server's URL and a key. Runs in an environment of its own. Its shape has no seed: the answers are greedy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anthropic

TASKS = json.loads((Path(__file__).parent / "tasks.json").read_text())
ASKED: dict[str, Any] = {
    "model": TASKS["model"],
    "messages": [{"role": "user", "content": TASKS["question"]}],
    "max_tokens": TASKS["response"]["max_output_tokens"],
    "extra_body": {"temperature": TASKS["response"]["temperature"]},
}
TOOL = {name: TASKS["tool"][name] for name in ("name", "description")} | {"input_schema": TASKS["tool"]["parameters"]}
CALL: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": TOOL["name"]},
    "max_tokens": TASKS["schema_tokens"],
}


def main(url: str, key: str) -> dict[str, object]:
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        create: Any = client.messages.create
        with client.messages.stream(**ASKED) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        with client.messages.stream(**ASKED | CALL) as stream:
            called = stream.get_final_message()
        call = create(**ASKED | CALL)
        result = {"type": "tool_result", "tool_use_id": call.content[-1].id, "content": "At nine."}
        turns = [
            *ASKED["messages"],
            {"role": "assistant", "content": call.content},
            {"role": "user", "content": [result]},
        ]
        after = create(**ASKED | {"messages": turns, "tools": [TOOL]})
        try:
            create(**ASKED | {"model": "nobody"})
            refusal: dict[str, object] = {}
        except anthropic.NotFoundError as error:
            refusal = {
                "status": error.status_code,
                "named": bool(error.request_id),
                "kind": error.body["error"]["type"],
            }
        return {
            "whole": answer(create(**ASKED)),
            "streamed": answer(final) | {"text": "".join(pieces)},
            "tool": tool(call),
            "tool_streamed": tool(called),
            "after_tool": after.stop_reason,
            "counted": client.messages.count_tokens(model=ASKED["model"], messages=ASKED["messages"]).input_tokens,
            "asked": create(**ASKED).usage.input_tokens + create(**ASKED).usage.cache_read_input_tokens,
            "models": [model.id for model in client.models.list()],
            "refusal": refusal,
        }


def answer(message: Any) -> dict[str, object]:
    text = "".join(block.text for block in message.content)
    return {"text": text, "reason": message.stop_reason, "usage": message.usage.output_tokens}


def tool(message: Any) -> dict[str, str]:
    return {"name": message.content[-1].name, "arguments": json.dumps(message.content[-1].input)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201  # its answer
