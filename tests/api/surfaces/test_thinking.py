"""What a model thinks before it answers, on every surface: apart from the answer, streamed and whole, sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from paceline.engine.base import ModelInfo
from paceline.runtime.service import GenerateEvent, TextDelta, TokenLogprob
from tests.api.scripted import MODEL, Script, ScriptedService, done

LETTER = ((TokenLogprob("x", -0.5, (120,)), ()),)
TWO: list[GenerateEvent] = [
    TextDelta("Two and", 2, logprobs=LETTER * 2, thinking=True),
    TextDelta(" two.", 2, logprobs=LETTER * 2, thinking=True),
    TextDelta("Fo", 1, logprobs=LETTER),
    TextDelta("ur.", 1, logprobs=LETTER),
    done(completion_tokens=6, stats={"reasoning_tokens": 4.0}),
]
CUT: list[GenerateEvent] = [*TWO[:2], done("length", completion_tokens=4, stats={"reasoning_tokens": 4.0})]
ASKED = {"messages": [{"role": "user", "content": "2 + 2?"}]}


@pytest.fixture(autouse=True)
def thinks(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    model = replace(MODEL, thinking=("<think>", "</think>"))
    monkeypatch.setattr(ScriptedService, "models", lambda _: (model, ModelInfo("plain", "e" * 64, 256, 4096, "", "")))
    service.script = Script(TWO)
    return iter((None,))


def chat(http: httpx.Client, **fields: object) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"model": "scripted", **ASKED, **fields})
    assert response.status_code == 200, response.text
    return response.json() if not fields.get("stream") else {"text": response.text}


def test_a_chat_has_it_beside_the_content(http: httpx.Client, service: ScriptedService) -> None:
    whole = chat(http, logprobs=True)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    assert len(whole["choices"][0]["logprobs"]["content"]) == 6
    hidden = chat(http, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden and hidden["content"] == "Four."
    service.script = Script(CUT)
    (choice,) = chat(http)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_the_official_client_streams_it(url: str, service: ScriptedService) -> None:
    service.script = Script(
        [*TWO[:2], TextDelta('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', 9), done()]
    )
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    messages: Any = ASKED["messages"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.chat.completions.create(model="scripted", messages=messages, tools=tools, stream=True, n=2)
        deltas = [chunk.choices[0] for chunk in stream]
        thought = [getattr(choice.delta, "reasoning_content", None) for choice in deltas if choice.index == 1]
        assert [text for text in thought if text] == ["Two and", " two."]
        calls = [call for choice in deltas if choice.index == 0 for call in choice.delta.tool_calls or ()]
        assert (calls[0].function and calls[0].function.name, len(calls)) == ("add", 2)
        service.script = Script(TWO)
        with client.responses.stream(model="scripted", input="2 + 2?", reasoning={"effort": "low"}) as events:
            kinds = [(event.type, getattr(event, "delta", None)) for event in events]
            response = events.get_final_response()
        assert [delta for kind, delta in kinds if kind == "response.reasoning_text.delta"] == ["Two and", " two."]
        kinds_of_parts = [kind for kind, _ in kinds if kind.startswith(("response.content_part", "response.reasoning"))]
        assert kinds_of_parts[-4:-2] == ["response.reasoning_text.done", "response.content_part.done"]
        reasoning, answer = response.output
        assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == "Two and two."
        assert answer.type == "message" and response.output_text == "Four."
        assert response.usage and response.usage.output_tokens_details.reasoning_tokens == 4
        assert response.reasoning and response.reasoning.effort == "low"
        client.responses.create(model="scripted", input="And 3?", previous_response_id=response.id)
        client.responses.create(
            model="scripted",
            input=[*(item.model_dump() for item in response.output), {"role": "user", "content": "And 3?"}],  # type: ignore[misc, list-item]
        )
    for request in service.requests[-2:]:
        assert request.prompt.messages[-2]["content"] == "<think>\nTwo and two.\n</think>\n\nFour."


def test_a_response_that_is_cut_in_it_is_its_item_alone(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script(CUT)
    response = http.post("/v1/responses", json={"model": "scripted", "input": "2 + 2?"}).json()
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]
    stored = http.get(f"/v1/responses/{response['id']}").json()
    assert stored["output"] == response["output"]


def messages(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/messages", json={"model": "scripted", "max_tokens": 9, **ASKED, **fields})


def test_a_message_has_it_as_a_block_where_it_is_asked_for(http: httpx.Client, service: ScriptedService) -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 7}}
    whole = messages(http, **asked).json()
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Two and two.", "signature": ""},
        {"type": "text", "text": "Four."},
    ]
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    data = [json.loads(line[6:]) for line in messages(http, **asked, stream=True).text.splitlines() if line[:1] == "d"]
    told = [
        body.get("delta", {}).get("type") or body.get("content_block", {}).get("type") or body["type"] for body in data
    ]
    assert told[1:-2] == [
        *("thinking", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop"),
        *("text", "text_delta", "text_delta", "content_block_stop"),
    ]
    for more in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive", "display": "omitted"}}):
        assert messages(http, **more).json()["content"] == [{"type": "text", "text": "Four."}]
    assert [request.output.thinking_tokens for request in service.requests] == [7, 7, 0, 0, None]
    enabled = [request.prompt.template.get("enable_thinking") for request in service.requests[1:]]
    assert enabled == [True, False, False, None]
    turns = [{"role": "assistant", "content": whole["content"]}, {"role": "user", "content": "And 3?"}]
    messages(http, messages=[*ASKED["messages"], *turns])
    assert service.requests[-1].prompt.messages[1]["content"] == "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_lines_have_it_beside_the_text(http: httpx.Client, service: ScriptedService, path: str) -> None:
    body = {"model": "scripted", "think": "high", **ASKED, "prompt": "2 + 2?"}
    lines = [json.loads(line) for line in http.post(path, json=body).text.splitlines()]
    said = [line.get("message", line) for line in lines]
    assert "".join(line.get("thinking", "") for line in said) == "Two and two."
    assert "".join(line.get("content", line.get("response", "")) for line in said) == "Four."
    whole = http.post(path, json=body | {"stream": False, "think": False}).json()
    assert whole.get("message", whole)["thinking"] == "Two and two."
    first, second = (request.prompt.template for request in service.requests)
    assert (first["enable_thinking"], first["reasoning_effort"], second["enable_thinking"]) == (True, "high", False)
    assert http.post(path, json=body | {"model": "plain"}).status_code == 400
    assert http.post("/api/show", json={"model": "scripted"}).json()["capabilities"][-1] == "thinking"


def test_how_much_it_thinks_is_asked_for_in_many_ways(http: httpx.Client, service: ScriptedService) -> None:
    cases: list[tuple[dict[str, object], dict[str, object], int | None]] = [
        ({}, {}, None),
        ({"enable_thinking": True}, {"enable_thinking": True}, None),
        ({"enable_thinking": False}, {"enable_thinking": False}, 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, 0),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}, 0),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}, None),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": 1}}, {"thinking": 1}, None),
        ({"reasoning": {"enabled": True, "max_tokens": 9}}, {"enable_thinking": True}, 9),
        ({"thinking_token_budget": 5, "reasoning": {"max_tokens": 9}}, {}, 5),
    ]
    for fields, template, tokens in cases:
        chat(http, **fields)
        asked = service.requests[-1]
        assert template.items() <= asked.prompt.template.items() and bool(template) == bool(asked.prompt.template)
        assert asked.output.thinking_tokens == tokens


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_model_that_does_not_think_reads_no_thinking(http: httpx.Client, service: ScriptedService, name: str) -> None:
    answer = {"role": "assistant", "content": "Four.", name: "Two."}
    turns = [*ASKED["messages"], answer, {"role": "user", "content": "?"}]
    chat(http, messages=turns)
    chat(http, messages=turns, model="plain")
    texts = [request.prompt.messages[1]["content"] for request in service.requests]
    assert texts == ["<think>\nTwo.\n</think>\n\nFour.", "Four."]
