"""`/v1/responses` over a real server: shapes, state, errors and ownership."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from paceline.api.responses.store import EventStore
from paceline.errors import ConfigError, LinkClosed, RequestError
from paceline.runtime.service import TextDelta, TokenLogprob
from tests.api.responses.test_events import CALL
from tests.api.scripted import Script, ScriptedService, Signal, answering, client_of, done

ASK: dict[str, object] = {"model": "scripted", "input": "Hi"}
TOOL: dict[str, object] = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def post(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/responses", json=ASK | fields)


def error_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    """(status, param, code)"""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["code"]


# ---- the official client --------------------------------------------------------------------------------------------
def test_a_response_is_made_kept_listed_and_deleted(client: openai.OpenAI, service: ScriptedService) -> None:
    made = client.responses.create(model="scripted", input="Hi", metadata={"a": "b"}, instructions="Be brief.")
    assert (made.status, made.output_text, made.metadata) == ("completed", "Hello there.", {"a": "b"})
    assert made.id.startswith("resp_") and made.output[0].id is not None and made.output[0].id.startswith("msg_")
    assert made.usage is not None and made.usage.total_tokens == 10
    assert made.usage.input_tokens_details.cached_tokens == made.usage.output_tokens_details.reasoning_tokens == 0
    assert client.responses.retrieve(made.id) == made
    items = client.responses.input_items.list(made.id).data
    assert [json.loads(item.model_dump_json())["content"][0]["text"] for item in items] == ["Hi"]
    assert not service.forgotten
    client.responses.delete(made.id)
    assert service.forgotten == [""], "what it taught look-up tables goes too"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_deltas_name_the_side_that_decided_them_where_a_report_is_asked_for(
    http: httpx.Client, service: ScriptedService
) -> None:
    service.script = Script([TextDelta("A", 1, "cloud"), TextDelta("b", 1, "device"), TextDelta("c", 1), done()])
    told = {}
    for report in (True, False):
        body = post(http, stream=True, paceline={"report": report}).text
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
        told[report] = [
            (event["delta"], event.get("paceline")) for event in events if event["type"] == "response.output_text.delta"
        ]
    assert told[True] == [("A", {"lane": "cloud"}), ("b", {"lane": "device"}), ("c", {"lane": None})]
    assert told[False] == [("A", None), ("b", None), ("c", None)]


class City(BaseModel):
    name: str


def test_the_helpers_parse_and_accumulate(client: openai.OpenAI, service: ScriptedService) -> None:
    service.script = Script(answering('{"name"', ': "Ulm"}'))
    parsed = client.responses.parse(model="scripted", input="Where?", text_format=City)
    assert parsed.output_parsed == City(name="Ulm")
    constraint = service.requests[-1].output.constraint
    assert constraint is not None and constraint.kind == "json_schema"
    with client.responses.stream(model="scripted", input="Where?", text_format=City) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_parsed == City(name="Ulm")


def test_a_call_goes_out_and_its_output_comes_back(client: openai.OpenAI, service: ScriptedService) -> None:
    service.script = Script(answering(CALL[:30], CALL[30:]))
    asked = client.responses.create(
        model="scripted",
        input="Where is it?",
        tools=[TOOL, {"type": "web_search"}],
        tool_choice="required",  # type: ignore[list-item]
    )
    (call,) = asked.output
    assert call.type == "function_call" and call.name == "look_up" and json.loads(call.arguments) == {"city": "Ulm"}
    assert [tool.type for tool in asked.tools] == ["function"]
    service.script = Script(answering("In Ulm."))
    answered = client.responses.create(
        model="scripted",
        previous_response_id=asked.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "Ulm"}],
    )
    assert answered.output_text == "In Ulm."
    roles = [message["role"] for message in service.requests[-1].prompt.messages]
    assert roles == ["user", "assistant", "tool"]
    assert "look_up" in service.requests[-1].prompt.messages[1]["content"]


def test_a_conversation_goes_on_but_instructions_do_not(client: openai.OpenAI, service: ScriptedService) -> None:
    first = client.responses.create(model="scripted", input="One?", instructions="Be brief.")
    second = client.responses.create(model="scripted", input="Two?", previous_response_id=first.id)
    client.responses.create(model="scripted", input="Three?", previous_response_id=second.id, instructions="Be long.")
    received = [(message["role"], message["content"]) for message in service.requests[-1].prompt.messages]
    answer = ("assistant", "Hello there.")
    assert received == [("system", "Be long."), ("user", "One?"), answer, ("user", "Two?"), answer, ("user", "Three?")]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="scripted", input="Four?", previous_response_id=second.id)
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_background_response_runs_without_its_client_and_can_be_cancelled(
    client: openai.OpenAI, service: ScriptedService
) -> None:
    go = Signal()
    script = service.script = Script([TextDelta("Hello", 1), go, TextDelta(" there.", 1), done()])
    made = client.responses.create(model="scripted", input="Hi", background=True)
    assert made.status == "in_progress" and script.began.wait()
    stream = client.responses.retrieve(made.id, stream=True)
    seen = []
    for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta" and event.delta == "Hello":
            assert client.responses.retrieve(made.id).output_text == "Hello"
            go.set()
    assert seen[-1].type == "response.completed"
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    for after in range(len(seen)):
        assert list(client.responses.retrieve(made.id, stream=True, starting_after=after)) == seen[after + 1 :]
    assert client.responses.retrieve(made.id).output_text == "Hello there."
    assert client.responses.retrieve(made.id) == seen[-1].response
    assert client.responses.cancel(made.id).status == "completed", "too late"

    script = service.script = Script([TextDelta("Hello", 1), Signal()])
    made = client.responses.create(model="scripted", input="Hi", background=True)
    assert script.began.wait()
    assert client.responses.cancel(made.id).status == "cancelled"
    assert script.ended.wait()
    assert client.responses.cancel(made.id).status == "cancelled", "twice is as good as once"
    assert [event.type for event in client.responses.retrieve(made.id, stream=True)][-1] == "response.incomplete"


# ---- leaving --------------------------------------------------------------------------------------------------------
def test_leaving_a_stream_in_the_foreground_cancels_it(client: openai.OpenAI, service: ScriptedService) -> None:
    script = service.script = Script([TextDelta("Hello", 1), Signal()])
    stream = client.responses.create(model="scripted", input="Hi", stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    assert script.ended.wait()
    list(client.responses.retrieve(first.response.id, stream=True))
    assert client.responses.retrieve(first.response.id).status == "cancelled"


def test_leaving_while_a_whole_answer_is_written_ends_it(url: str, service: ScriptedService) -> None:
    script = service.script = Script([TextDelta("Hello", 1), Signal()])
    with client_of(url) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/responses", json=ASK, timeout=httpx.Timeout(30, read=0.2))
    assert script.ended.wait()


def test_a_running_response_that_is_deleted_ends(http: httpx.Client, service: ScriptedService) -> None:
    script = service.script = Script([TextDelta("Hello", 1), Signal()])
    made = post(http, background=True).json()["id"]
    assert http.delete(f"/v1/responses/{made}").json() == {"id": made, "object": "response", "deleted": True}
    assert script.ended.wait()
    assert http.get(f"/v1/responses/{made}").status_code == 404


# ---- storage --------------------------------------------------------------------------------------------------------
def test_a_response_that_is_not_stored_is_not_found_afterwards(http: httpx.Client) -> None:
    made = post(http, store=False).json()
    assert made["status"] == "completed" and made["store"] is False
    assert error_of(http.get(f"/v1/responses/{made['id']}"))[0] == 404
    streamed = post(http, store=False, stream=True).text
    assert "event: response.completed" in streamed and "[DONE]" not in streamed


def test_input_items_come_in_pages(http: httpx.Client) -> None:
    given = [{"role": "user", "content": str(number), "id": f"msg_{number}"} for number in range(5)]
    path = f"/v1/responses/{post(http, input=given).json()['id']}/input_items"

    def ids(**query: object) -> tuple[list[str], bool]:
        page = http.get(path, params=query).json()  # type: ignore[arg-type]  # numbers and words
        assert page["first_id"] == page["data"][0]["id"] and page["last_id"] == page["data"][-1]["id"]
        return [item["id"] for item in page["data"]], page["has_more"]

    assert ids() == (["msg_4", "msg_3", "msg_2", "msg_1", "msg_0"], False)
    assert ids(order="asc", limit=2) == (["msg_0", "msg_1"], True)
    assert ids(order="asc", limit=2, after="msg_1") == (["msg_2", "msg_3"], True)
    assert ids(order="asc", after="msg_3") == (["msg_4"], False)
    assert error_of(http.get(path, params={"after": "msg_9"})) == (400, "after", None)
    assert error_of(http.get(path, params={"limit": "0"})) == (400, "limit", None)


# ---- fields ---------------------------------------------------------------------------------------------------------
def test_fields_reach_the_generation(http: httpx.Client, service: ScriptedService) -> None:
    one = TokenLogprob("Hi", -0.5, (72, 105))
    service.script = Script([TextDelta("Hi", 1, logprobs=((one, (one,)),)), done("length", degraded="device_lost")])
    answer = post(
        http,
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=3,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
        text={"format": {"type": "json_object"}},
        paceline={"strategy": "autoregressive", "documents": 1, "report": True},
    ).json()
    asked = service.requests[-1]
    assert (asked.wish.sampling.temperature, asked.wish.sampling.top_p) == (0.5, 0.25)
    assert (asked.output.max_tokens, asked.wish.top_logprobs) == (3, 1)
    assert (asked.wish.strategy, asked.wish.documents) == ("autoregressive", 1)
    assert asked.output.constraint is not None and asked.output.constraint.kind == "json_object"
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["logprobs"][0]["logprob"] == -0.5
    assert answer["paceline"]["degraded"] == "device_lost" and answer["text"]["format"] == {"type": "json_object"}


def test_unsupported_requests_are_refused_by_name(http: httpx.Client) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"model": 3}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"temperature": 101}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"conversation": "conv_1", "store": False}, "store"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, TOOL | {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"paceline": {"strategy": "magic"}}, "paceline.strategy"),
        ({"paceline": {"unknown": 1}}, "paceline.unknown"),
    ]
    for fields, param in cases:
        answer = post(http, **fields)
        assert error_of(answer)[:2] == (400, param), answer.text


def test_an_unknown_response_is_not_found(http: httpx.Client) -> None:
    assert error_of(post(http, model="gpt-9")) == (404, "model", "model_not_found")
    for method, where in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert error_of(http.request(method, f"/v1/responses/resp_unknown{where}")) == (404, "response_id", None)


def test_questions_about_a_response_are_checked(http: httpx.Client) -> None:
    path = f"/v1/responses/{post(http).json()['id']}"
    assert error_of(http.get(path, params={"starting_after": "1"})) == (400, "starting_after", None)
    assert error_of(http.get(path, params={"stream": "true", "starting_after": "x"})) == (400, "starting_after", None)
    assert error_of(http.get(path, params={"stream": "perhaps"})) == (400, "stream", None)
    assert http.post(path + "/cancel").status_code == 400, "it was made in the foreground"
    assert http.get(path, params={"stream": "true", "starting_after": "99"}).text == ""


# ---- failures -------------------------------------------------------------------------------------------------------
def test_a_failure_is_an_error_without_a_stream_and_an_event_in_one(
    client: openai.OpenAI, http: httpx.Client, service: ScriptedService
) -> None:
    service.script = Script([TextDelta("Half", 1), LinkClosed("The device has gone.")])
    assert error_of(post(http)) == (503, None, "link_lost")
    last = list(client.responses.create(model="scripted", input="Hi", stream=True))[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "The device has gone." and last.response.output_text == "Half"
    assert client.responses.retrieve(last.response.id) == last.response
    made = client.responses.create(model="scripted", input="Hi", background=True)
    assert [event.type for event in client.responses.retrieve(made.id, stream=True)][-1] == "response.failed"


def test_a_request_that_is_not_admitted_leaves_nothing(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script(refusal=RequestError("Full.", status=429, type="rate_limit_error", code="busy"))
    answer = post(http, stream=True)
    assert error_of(answer) == (429, None, "busy") and answer.headers["retry-after"]


def test_a_disk_that_refuses_ends_the_answer_and_not_the_server(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise ConfigError("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr(EventStore, "write", refusing)
        streamed = post(http, stream=True)
        assert streamed.status_code == 200 and "Hello" not in streamed.text
        assert streamed.text.startswith('event: error\ndata: {"type":"error","code":"server_error"')
        whole = post(http)
        assert whole.status_code == 503 and "cannot use its files" in whole.json()["error"]["message"]
        assert post(http, store=False).json()["status"] == "completed"
    assert service.script.ended.wait()
    assert post(http).json()["status"] == "completed"


def test_a_call_of_another_servers_custom_tool_is_read_as_a_functions(
    http: httpx.Client, service: ScriptedService
) -> None:
    items = [
        {"role": "user", "content": "Patch it."},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'say "hi"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Done."}]},
    ]
    assert http.post("/v1/responses", json={"model": "scripted", "input": items}).status_code == 200
    _, call, result = service.requests[-1].prompt.messages
    assert "apply_patch" in call["content"] and r'{"input": "say \"hi\""}' in call["content"]
    assert "Done." in result["content"]
