"""`/v1/messages`: what is asked becomes a chat, and what is written becomes Anthropic's blocks and events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from paceline.errors import RequestError
from paceline.runtime.service import Citation, GenerateEvent, TextDelta, WorkflowStep
from tests.api.scripted import Script, ScriptedService, answering, client_of, done, serving

BODY: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {"city": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CITED = Citation("cloud", "notes.md", "The passage.", 0.5)


def post(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/messages", json=BODY | fields)


def whole(http: httpx.Client, **fields: object) -> dict[str, Any]:
    response = post(http, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def events(http: httpx.Client, **fields: object) -> list[dict[str, Any]]:
    """Bodies of the events, whose names must be their types."""
    response = post(http, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events."""
    message: dict[str, Any] = {}
    pieces: dict[int, str] = {}
    for event in stream:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "citations_delta":
                message["content"][-1].setdefault("citations", []).append(event["delta"]["citation"])
            case "content_block_delta":
                (text,) = (value for name, value in event["delta"].items() if name != "type")
                pieces[event["index"]] = pieces.get(event["index"], "") + text
            case "content_block_stop":
                block, text = message["content"][event["index"]], pieces.get(event["index"], "")
                block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
                message |= {"paceline": event["paceline"]} if "paceline" in event else {}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}


STEP = WorkflowStep("search", "done", "cpu", 0.1, "2 passages")
SCRIPTS: dict[str, list[GenerateEvent]] = {
    "text": answering("Hel", "lo"),
    "nothing": answering(),
    "cited": answering("It opens.", citations=(CITED,)),
    "a call": answering("I look", " it up. ", CALL[:20], CALL[20:]),
    "two calls": answering(CALL, CALL),
    "cut": [TextDelta("a", 1), done("length")],
    "a stop sequence": [TextDelta("a", 1), done("stop", stop="END")],
    "steps": [TextDelta("", 0, step=STEP), TextDelta("b", 1), done()],
    "degraded": answering("a", degraded="device_lost"),
    "cached": answering("a", stats={"cached_tokens": 4}),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("report", [True, False])
def test_a_stream_adds_up_to_the_whole_answer(
    http: httpx.Client, service: ScriptedService, name: str, report: bool
) -> None:
    service.script = Script(SCRIPTS[name])
    fields = {"tools": [TOOL], "paceline": {"report": report}}
    assert without_ids(joined(events(http, **fields))) == without_ids(whole(http, **fields))


def test_a_stream_begins_with_the_message_and_ends_with_its_stop(http: httpx.Client) -> None:
    found = [event["type"] for event in events(http)]
    pieces = ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    assert found == ["message_start", *pieces, "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("name", "reason", "stop"),
    [
        ("text", "end_turn", None),
        ("a call", "tool_use", None),
        ("cut", "max_tokens", None),
        ("a stop sequence", "stop_sequence", "END"),
    ],
)
def test_the_reason_of_the_end_is_named(
    http: httpx.Client, service: ScriptedService, name: str, reason: str, stop: str | None
) -> None:
    service.script = Script(SCRIPTS[name])
    message = whole(http, tools=[TOOL])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_a_call_that_was_cut_has_what_was_written_of_it(http: httpx.Client, service: ScriptedService) -> None:
    begun = CALL.partition("}}")[0] + ', "unit": "ce'
    service.script = Script([TextDelta(begun, 1), done("length")])
    (block,) = whole(http, tools=[TOOL])["content"]
    assert (block["name"], block["input"]) == ("weather", {"city": "Paris"})


def test_usage_counts_cached_tokens_apart(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script(SCRIPTS["cached"])
    usage = whole(http)["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 4, 3)
    start = events(http)[0]["message"]["usage"]
    assert start["input_tokens"] == 7 and start["output_tokens"] == 0


def test_documents_are_cited_by_the_text_as_found_by_the_server(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script(SCRIPTS["cited"])
    (citation,) = whole(http)["content"][0]["citations"]
    assert citation["type"] == "web_search_result_location"
    assert (citation["cited_text"], citation["title"]) == ("The passage.", "notes.md")
    assert citation["url"] == "paceline://cloud/notes.md"


def test_what_is_asked_becomes_a_chat(http: httpx.Client, service: ScriptedService) -> None:
    calling = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
    ]
    returned = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": calling},
        {"role": "user", "content": [returned, {"type": "text", "text": "And now?"}]},
    ]
    system = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]
    sampling = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "stop_sequences": ["END"]}
    whole(http, system=system, messages=messages, **sampling)
    (asked,) = service.requests
    assert [message["role"] for message in asked.prompt.messages] == ["system", "user", "assistant", "tool", "user"]
    assert asked.prompt.messages[0]["content"] == "Be kind.\nBe brief."
    assert "hm" not in asked.prompt.messages[2]["content"] and '"city": "Paris"' in asked.prompt.messages[2]["content"]
    assert "rain" in asked.prompt.messages[3]["content"]
    assert (asked.output.max_tokens, asked.output.stop) == (9, ("END",))
    assert (asked.wish.sampling.temperature, asked.wish.sampling.top_k, asked.wish.sampling.top_p) == (0.5, 7, 0.9)


def test_a_failed_tool_is_said_to_have_failed(http: httpx.Client, service: ScriptedService) -> None:
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no such city", "is_error": True}
    whole(http, messages=[{"role": "user", "content": [failed]}])
    assert "Error: no such city" in service.requests[0].prompt.messages[0]["content"]


@pytest.mark.parametrize(
    ("choice", "required", "parallel"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "weather"}, True, False),
    ],
)
def test_tool_choices_hold(
    http: httpx.Client, service: ScriptedService, choice: dict[str, object], required: bool, parallel: bool
) -> None:
    whole(http, tools=[TOOL], tool_choice=choice)
    constraint = service.requests[0].output.constraint
    assert constraint is not None
    fields = json.loads(constraint.text)
    assert (fields["required"], fields["parallel"]) == (required, parallel)


def changed(kind: str, name: str) -> dict[str, object]:
    return {"type": kind, "tool": {"type": "tool_reference", "name": name}}


USER: dict[str, object] = {"role": "user", "content": "Hi"}
LATER = TOOL | {"name": "later", "defer_loading": True}
NEW = {"type": "tool_definition", "definition": TOOL | {"name": "new"}}
DEFINED = {"type": "tool_addition", "tool": NEW}
RESULT: dict[str, object] = {"type": "tool_result", "tool_use_id": "a"}
FOUND = {"type": "tool_reference", "tool_name": "later"}


@pytest.mark.parametrize(
    ("later", "offered"),
    [
        ([], {"weather"}),
        ([{"role": "user", "content": [RESULT | {"content": [FOUND]}]}], {"weather", "later"}),
        ([{"role": "system", "content": [changed("tool_addition", "later")]}], {"weather", "later"}),
        ([{"role": "system", "content": [changed("tool_removal", "weather"), DEFINED]}], {"new"}),
        ([{"role": "system", "content": [changed("tool_removal", "weather")]}], set()),
    ],
)
def test_tools_are_offered_from_where_a_message_says(
    http: httpx.Client, service: ScriptedService, later: list[dict[str, object]], offered: set[str]
) -> None:
    whole(http, messages=[USER, *later], tools=[TOOL, LATER])
    prompt = str(service.requests[0].prompt.messages)
    assert {name for name in ("weather", "later", "new") if f'"name": "{name}"' in prompt} == offered


def test_system_messages_stand_where_they_were_sent(http: httpx.Client, service: ScriptedService) -> None:
    texts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    whole(http, system="First.", messages=[USER, {"role": "system", "content": texts}])
    assert [(one["role"], one["content"]) for one in service.requests[0].prompt.messages] == [
        ("system", "First."),
        ("user", "Hi"),
        ("system", "Be brief.\nBe kind."),
    ]


def test_a_system_message_for_one_turn_is_gone_in_the_next(http: httpx.Client, service: ScriptedService) -> None:
    once = {"role": "system", "content": "Plan only.", "clear_at": "next_user_message"}
    whole(http, messages=[USER, once])
    whole(http, messages=[USER, once, {"role": "assistant", "content": "A plan."}, USER])
    assert ["Plan only." in str(one.prompt.messages) for one in service.requests] == [True, False]


def test_blocks_of_other_servers_that_are_no_text_are_left_out(http: httpx.Client, service: ScriptedService) -> None:
    earlier = [
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "compaction", "content": "They greeted.", "encrypted_content": "x"},
        {"type": "text", "text": "Hello.", "citations": None},
    ]
    whole(http, messages=[USER, {"role": "assistant", "content": earlier}, USER])
    assert service.requests[0].prompt.messages[1]["content"] == "They greeted.\nHello."


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_format_holds_the_answer(http: httpx.Client, service: ScriptedService, place: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    whole(http, **{place: {"format": wanted} if place == "output_config" else wanted})
    constraint = service.requests[0].output.constraint
    assert constraint is not None and constraint.kind == "json_schema"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
REMOTE = {"type": "mcp_tool_use", "id": "a", "name": {"odd": 1}, "content": {"of": "another server"}}
UNKNOWN = {"type": "tool_addition", "tool": {"type": "mcp_tool_reference", "name": "a", "server_name": "b"}}


def test_refusals_have_anthropics_shape(http: httpx.Client) -> None:
    nested = RESULT | {"content": [IMAGE]}
    cases: list[tuple[dict[str, object], str]] = [
        ({"model": "nobody"}, "nobody"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [REMOTE]}]}, "'mcp_tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "'image'"),
        ({"messages": [{"role": "system", "content": [UNKNOWN]}]}, "tool_reference"),
        ({"messages": [{"role": "user", "content": [nested]}]}, "messages[0].content[0].content[0]"),
        ({"thread": {"id": "t"}}, "thread"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_1", "name": "w"}]}, "web_search_1"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"paceline": {"strategi": "x"}}, "paceline.strategi"),
    ]
    for fields, words in cases:
        response = post(http, stream="model" in fields, **fields)
        status, kind = (404, "not_found_error") if "model" in fields else (400, "invalid_request_error")
        body = response.json()
        assert response.status_code == status and body["type"] == "error", fields
        assert body["error"]["type"] == kind and words in body["error"]["message"]
        assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
        assert ("details" in body["error"]) == ("thread" in fields)


def test_a_refused_thread_tells_the_tool_runner_to_go_on_without(http: httpx.Client) -> None:
    """Source: `_unsupported_features` of anthropic-sdk-python 2.14, lib/threads/_thread_state.py."""
    error = post(http, thread={"type": "create"}).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_a_prompt_that_is_too_long_is_refused_in_the_words_agents_know(
    http: httpx.Client, service: ScriptedService
) -> None:
    service.script = Script(refusal=RequestError("2 tokens.", code="context_length_exceeded", param="messages"))
    assert post(http).json()["error"]["message"] == "prompt is too long: 2 tokens."


def test_a_key_may_come_alone_in_a_header_of_its_own(service: ScriptedService) -> None:
    with serving(service, {"right": None}) as url, client_of(url) as http:
        for headers, status in (
            ({"x-api-key": "right"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "right", "authorization": "Bearer wrong"}, 401),
            ({}, 401),
        ):
            response = http.post("/v1/messages", json=BODY, headers={"anthropic-version": "2023-06-01"} | headers)
            assert response.status_code == status, headers
            if status == 401:
                assert response.json()["error"]["type"] == "authentication_error"


def test_tokens_are_counted_without_an_answer(http: httpx.Client, service: ScriptedService) -> None:
    body = {"model": "scripted", "messages": BODY["messages"]}
    counted = http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": 2} and not service.requests
    said = {"messages": [USER, {"role": "system", "content": "Be brief."}]}
    counted = http.post("/v1/messages/count_tokens", json=body | said)
    assert counted.json() == {"input_tokens": len("HiBe brief.")}, "in the same roles"
    with_tools = http.post("/v1/messages/count_tokens", json=body | {"tools": [TOOL]}).json()["input_tokens"]
    assert with_tools > 100
