"""Perform the tasks of tasks.json with LangChain's ChatOpenAI and print the results, by task, as one JSON object.

Arguments: the server's URL and a key. Runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

TASKS = json.loads((Path(__file__).parent / "tasks.json").read_text())


def chat(url: str, key: str, **more: Any) -> ChatOpenAI:
    fields = TASKS["sampling"] | {"model": TASKS["model"]} | more
    return ChatOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60, **fields)


def calls(message: Any) -> dict[str, str]:
    (call,) = message.tool_calls
    return {"name": call["name"], "arguments": json.dumps(call["args"])}


def main(url: str, key: str) -> dict[str, object]:
    model, question = chat(url, key), TASKS["question"]
    long = chat(url, key, max_tokens=TASKS["schema_tokens"])
    whole = model.invoke(question)
    streamed = None
    for chunk in chat(url, key, stream_usage=True).stream(question):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    tool = {"type": "function", "function": TASKS["tool"]}
    forced = long.bind_tools([tool], tool_choice=TASKS["tool"]["name"])
    pieces = None
    for chunk in forced.stream(question):
        pieces = chunk if pieces is None else pieces + chunk
    schema = {"title": "place", **TASKS["schema"]}
    asked = model.bind(logprobs=True, top_logprobs=3).invoke(question).response_metadata["logprobs"]["content"]
    try:
        chat(url, key, model="nobody").invoke(question)
        refusal: dict[str, object] = {}
    except openai.APIStatusError as error:
        named = error.request_id is not None
        refusal = {"kind": type(error).__name__, "status": error.status_code, "code": error.code, "named": named}
    embedder = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key=key, model=TASKS["embedder"], check_embedding_ctx_length=False, max_retries=0
    )  # the check would download a tokenizer
    tokens = TASKS["response"]["max_output_tokens"]
    responses = chat(url, key, seed=None, temperature=0, max_tokens=tokens, use_responses_api=True)
    said = responses.invoke(question)
    return {
        "embeddings": embedder.embed_documents(TASKS["texts"]),
        "responses": {"text": said.text, "streamed": "".join(chunk.text for chunk in responses.stream(question))},
        "whole": answer(whole),
        "streamed": answer(streamed),
        "schema": json.dumps(long.with_structured_output(schema, method="json_schema", strict=True).invoke(question)),
        "tool": calls(forced.invoke(question)),
        "tool_streamed": calls(pieces),
        "logprobs": [[each["logprob"], each["bytes"], len(each["top_logprobs"])] for each in asked],
        "refusal": refusal,
    }


def answer(message: Any) -> dict[str, object]:
    reason, usage = message.response_metadata["finish_reason"], message.usage_metadata
    return {"text": message.content, "reason": reason, "usage": usage["output_tokens"]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201  # its answer
