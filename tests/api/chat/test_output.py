"""The shape of an answer, in one piece and streamed, as specified by OpenAI."""

from __future__ import annotations

import json
import math
from typing import Any  # parsed JSON

import httpx
import pytest

from paceline.runtime.service import Citation, TextDelta, TokenLogprob
from tests.api.conftest import BODY
from tests.api.scripted import Script, ScriptedService, answering, done

CITATION = Citation("device", "Ärzte & notes.md", "", 0.75)


def events(text: str) -> list[str]:
    """The data of each event, without comments."""
    assert text.endswith("\n\n")
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def stream(http: httpx.Client, **fields: object) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, after a check of its end."""
    response = http.post("/v1/chat/completions", json=BODY | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    *chunks, last = events(response.text)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def whole(http: httpx.Client, **fields: object) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_whole_answer_has_every_field_and_null(http: httpx.Client) -> None:
    body = whole(http)
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == "scripted"
    assert isinstance(body["created"], int) and body["system_fingerprint"]
    message = {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (7, 3)
    assert body["usage"]["total_tokens"] == 10
    assert "paceline" not in body


def test_a_stream_begins_with_the_role_and_ends_with_one_reason(http: httpx.Client) -> None:
    chunks = stream(http)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant" and choices[0]["delta"]["content"] == ""
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello there."
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk and "paceline" not in chunk for chunk in chunks)


def test_usage_comes_once_in_a_last_chunk_without_choices(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script(answering("a", stats={"drafted": 7.0, "accepted": 5.0, "cached_tokens": 4.0}))
    *others, last = stream(http, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 10
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    details = last["usage"]["completion_tokens_details"]
    # 5 drafts were accepted and 3 tokens written: EOS is not a completion token. The accepted ones count as written.
    assert last["usage"]["completion_tokens"] == 3
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 2)
    assert last["usage"] == whole(http)["usage"]
    several = whole(http, n=3)["usage"]
    assert (several["prompt_tokens"], several["completion_tokens"]) == (7, 9), "one prompt"
    assert several["prompt_tokens_details"]["cached_tokens"] == 4
    *_, last = stream(http, n=3, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens"] == 9


def test_headers_keep_proxies_from_holding_the_stream_back(http: httpx.Client) -> None:
    headers = http.post("/v1/chat/completions", json=BODY | {"stream": True}).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"].startswith("req_") and float(headers["openai-processing-ms"]) >= 0
    assert "content-encoding" not in headers
    assert "connection" not in headers, "that is the server's business, which may be about to close it"


def test_a_report_has_lanes_strategy_and_citations(http: httpx.Client, service: ScriptedService) -> None:
    pieces = [TextDelta("Both ", 1, "cloud"), TextDelta("sides", 1, "device"), TextDelta(".", 1, None)]
    end = done(citations=(CITATION,), stats={"accepted": 1.0})
    service.script = Script([*pieces, end])
    chunks = stream(http, paceline={"report": True})
    assert [chunk["paceline"] for chunk in chunks[1:-1]] == [{"lane": "cloud"}, {"lane": "device"}, {"lane": None}]
    cited = {"side": "device", "document": "Ärzte & notes.md", "passage": "", "score": 0.75}
    reported = {"strategy": "aggregate", "why": "both read.", "degraded": None, "energy": {}}
    reported |= {"citations": [cited], "stats": {"accepted": 1.0}}
    assert chunks[-1]["paceline"] == reported
    assert whole(http, paceline={"report": True})["paceline"] == reported


def test_citations_are_openai_annotations_too(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script(answering("Twelve.", citations=(CITATION,)))
    cited = {"title": "Ärzte & notes.md", "url": "paceline://device/%C3%84rzte%20%26%20notes.md"}
    expected = [{"type": "url_citation", "url_citation": {"start_index": 0, "end_index": 7, **cited}}]
    assert whole(http)["choices"][0]["message"]["annotations"] == expected
    assert stream(http)[-1]["choices"][0]["delta"] == {"annotations": expected}


@pytest.mark.parametrize("report", [True, False])
def test_the_last_event_is_marked_when_the_other_side_was_lost(
    http: httpx.Client, service: ScriptedService, report: bool
) -> None:
    service.script = Script(answering("a", "b", degraded="device_lost"))
    chunks = stream(http, paceline={"report": report})
    assert chunks[-1]["paceline"]["degraded"] == "device_lost"
    with_usage = stream(http, paceline={"report": report}, stream_options={"include_usage": True})
    assert [chunk["paceline"]["degraded"] for chunk in with_usage[-2:]] == ["device_lost"] * 2
    told = whole(http, paceline={"report": report})["paceline"]
    assert told["degraded"] == "device_lost" and told["why"]


def test_logprobs_carry_bytes_that_join_to_the_text(http: httpx.Client, service: ScriptedService) -> None:
    halves = [TokenLogprob("\ufffd", -0.5, (0xC3,)), TokenLogprob("\ufffd", -math.inf, (0xA9,))]
    service.script = Script([TextDelta("é", 2, logprobs=tuple((half, (half,)) for half in halves)), done()])
    content = whole(http, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == "é"
    assert [item["logprob"] for item in content] == [-0.5, -9999.0]
    assert [item["top_logprobs"][0]["bytes"] for item in content] == [[0xC3], [0xA9]]
    chunks = stream(http, logprobs=True, top_logprobs=1)
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks[1:-1]] == [{"content": content, "refusal": None}]


def test_a_piece_without_text_is_no_chunk(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([TextDelta("", 1), TextDelta("a", 1), done("length")])
    chunks = stream(http)
    assert len(chunks) == 3 and chunks[-1]["choices"][0]["finish_reason"] == "length"
