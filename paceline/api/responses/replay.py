"""Replay of logged events into the response they describe. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.api.http.errors import Failure, encode_json
from paceline.api.responses.events import Json, failed
from paceline.api.responses.store import ENDS, EventRow

RESTARTED = Failure(500, "The server was restarted before this response was finished.", "server_error")


def replay(rows: Sequence[EventRow]) -> Json:
    """The response after these events. `rows`: all of one response from the first on, or the last one alone."""
    response: Json = {}
    output: list[dict[str, object]] = []
    for row in rows:
        body = json.loads(row.data)
        if "response" in body:
            response = body["response"]
            if row.type in ENDS:
                return response
            output = []
            continue
        index = body["output_index"]
        match row.type:
            case "response.output_item.added":
                output.append(body["item"])
            case "response.output_item.done":
                output[index] = body["item"]
            case "response.content_part.added":
                _list(output[index], "content").append(body["part"])
            case "response.output_text.delta":
                part = _list(output[index], "content")[body["content_index"]]
                part["text"] += body["delta"]
                part["logprobs"] += body["logprobs"]
            case "response.output_text.annotation.added":
                _list(output[index], "content")[body["content_index"]]["annotations"].append(body["annotation"])
            case "response.reasoning_summary_part.added":
                _list(output[index], "summary").append(body["part"])
            case "response.reasoning_summary_text.delta":
                part = _list(output[index], "summary")[body["summary_index"]]
                part["text"] = f"{part['text']}{body['delta']}"
            case "response.function_call_arguments.delta":
                output[index]["arguments"] = f"{output[index]['arguments']}{body['delta']}"
            case _:
                pass  # events that end a part repeat its deltas
    return response | {"output": output}


def _list(item: dict[str, object], name: str) -> list[dict[str, object]]:
    value = item[name]
    assert isinstance(value, list), "as it was written"
    return value


def close_interrupted(rows: list[EventRow]) -> list[EventRow]:
    """The row that ends a response whose process died: failed, with the text written so far. See `EventLog`."""
    last = rows[-1]
    if last.type in ENDS:
        return []
    response = replay(rows)
    output = response["output"]
    assert isinstance(output, list), "as it was written"
    items = [item | ({"status": "incomplete"} if item["status"] == "in_progress" else {}) for item in output]
    kind, sequence = "response.failed", last.sequence + 1
    response = failed(response | {"output": items}, RESTARTED)
    return [EventRow(sequence, kind, encode_json({"type": kind, "sequence_number": sequence, "response": response}))]
