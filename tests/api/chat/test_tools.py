"""Tools and formats: the description for the model, the constraint, and the calls in the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any  # parsed JSON

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel

from paceline.runtime.service import GenerateEvent, GenerateRequest, TextDelta, TokenLogprob
from tests.api.chat.test_output import stream, whole
from tests.api.conftest import BODY
from tests.api.generation.test_request import Json, fault, post, schema_format
from tests.api.scripted import MODEL, Script, ScriptedService, done

CITY: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, parameters: Json | None = None) -> Json:
    function: Json = {"name": name, "description": f"Tells the {name}."}
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


WEATHER, TIME = tool("weather", CITY), tool("time")
TOOLS: list[Json] = [WEATHER, TIME]
ROME = '{"city": "Rome", "note": "a \\"}\\" é</tool_call>"}'
CALLS = (
    f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def letters(text: str, reason: str = "stop", size: int = 1) -> Script:
    """An answer in deltas of `size` characters, each with the logprob of a token of its bytes."""
    steps: list[GenerateEvent] = []
    for at in range(0, len(text), size):
        piece = text[at : at + size]
        logprob = TokenLogprob(piece, -0.5, tuple(piece.encode()))
        steps.append(TextDelta(piece, 1, logprobs=((logprob, ()),)))
    return Script([*steps, done(reason)])


def asked(http: httpx.Client, service: ScriptedService, **fields: object) -> GenerateRequest:
    service.requests.clear()
    response = post(http, **fields)
    assert response.status_code == 200, response.text
    return service.requests[-1]


def constraint(request: GenerateRequest) -> Any:
    assert request.output.constraint is not None and request.output.constraint.kind == "tools"
    return json.loads(request.output.constraint.text)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the chunks of one choice add up to, as the official clients add them."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for call in delta.pop("tool_calls", ()):
                known = message.setdefault("tool_calls", [])
                if call["index"] == len(known):
                    assert call["id"].startswith("call_") and call["type"] == "function" and call["function"]["name"]
                    known.append({key: value for key, value in call.items() if key != "index"})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    known[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            for key, value in delta.items():
                old = message.get(key)
                if isinstance(value, dict):
                    message[key] = {k: (old or {}).get(k, "") + v for k, v in value.items()} | (
                        {} if old is None else {k: v for k, v in old.items() if k not in value}
                    )
                else:
                    message[key] = old + value if isinstance(old, str) and value is not None else value
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls", [])]
    return message | {"tool_calls": calls}


# ---- the request to the service -------------------------------------------------------------------------------------
def test_tools_are_described_to_the_model_and_enforced(http: httpx.Client, service: ScriptedService) -> None:
    strict = {"type": "function", "function": {"name": "time", "description": "Tells the time.", "strict": True}}
    request = asked(http, service, tools=[WEATHER, strict])
    system, user = request.prompt.messages
    assert (system["role"], user) == ("system", {"role": "user", "content": "Hi"})
    assert f"<tools>\n{json.dumps(WEATHER)}\n" in system["content"] and "<tool_call>" in system["content"]
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [
        {"name": "weather", "parameters": CITY, "strict": False},
        {"name": "time", "parameters": nothing, "strict": True},
    ]
    assert constraint(request) == {"tools": tools, "required": False, "parallel": True}


def test_a_system_message_is_kept_and_added_to(http: httpx.Client, service: ScriptedService) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    system, _ = asked(http, service, messages=messages, tools=TOOLS).prompt.messages
    assert system["role"] == "system" and system["content"].startswith("Be brief.\n\n# Tools")


@pytest.mark.parametrize(
    ("choice", "names", "required", "parallel"),
    [
        (None, ["weather", "time"], False, True),
        ("auto", ["weather", "time"], False, True),
        ("required", ["weather", "time"], True, True),
        (named("time"), ["time"], True, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("time")]}}, ["time"], False, True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("time"), WEATHER]}},
            ["weather", "time"],
            True,
            True,
        ),
    ],
)
def test_tool_choice_limits_the_functions(
    http: httpx.Client, service: ScriptedService, choice: object, names: list[str], required: bool, parallel: bool
) -> None:
    request = asked(http, service, tools=TOOLS, tool_choice=choice)
    held = constraint(request)
    assert [one["name"] for one in held["tools"]] == names
    assert (held["required"], held["parallel"]) == (required, parallel)
    assert all(name in request.prompt.messages[0]["content"] for name in ("weather", "time")), "all are described"
    alone = asked(http, service, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert constraint(alone)["parallel"] is False


def test_tools_that_may_not_be_called_are_not_described(http: httpx.Client, service: ScriptedService) -> None:
    service.script = letters(CALLS)
    request = asked(http, service, tools=TOOLS, tool_choice="none")
    assert request.output.constraint is None and len(request.prompt.messages) == 1
    assert whole(http, tools=TOOLS, tool_choice="none")["choices"][0]["message"]["content"] == CALLS


def test_a_bad_tool_or_choice_is_named_and_starts_nothing(http: httpx.Client, service: ScriptedService) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("x")]}}
    deep = {"properties": json.loads('{"a":' * 70 + "1" + "}" * 70)}
    cases: list[tuple[str, Json]] = [
        ("tool_choice", {"tools": TOOLS, "tool_choice": named("clock")}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "always"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}),
        ("tool_choice.function.name", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": allowed}),
        ("tools[1].function.name", {"tools": [TIME, TIME]}),
        ("tools[0].function.name", {"tools": [tool("two words")]}),
        ("tools[0].function.name", {"tools": [tool("")], "tool_choice": "none"}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.parameters", {"tools": [tool("f", {"type": "array"})]}),
        ("tools[0].function.parameters", {"tools": [tool("f", deep)]}),
        ("tools", {"tools": [tool(f"f{i}") for i in range(129)]}),
        ("tools", {"tools": [tool("f", {"description": "x" * 40_000}), tool("g", {"description": "x" * 40_000})]}),
        ("functions", {"tools": TOOLS, "functions": [WEATHER["function"]]}),
        ("function_call", {"functions": [WEATHER["function"]], "function_call": {"name": "time"}}),
        ("functions[1].name", {"functions": [WEATHER["function"]] * 2}),
    ]
    for param, fields in cases:
        for streamed in (False, True):
            assert fault(post(http, stream=streamed, **fields))["param"] == param, fields
    assert not service.requests


def test_results_are_written_in_the_order_of_the_calls(http: httpx.Client, service: ScriptedService) -> None:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ("a", "b")]
    messages = [
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "second"}]},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
        {"role": "user", "content": "Well?"},
    ]
    roles = [message["role"] for message in asked(http, service, messages=messages).prompt.messages]
    assert roles == ["user", "assistant", "tool", "user"]
    one, two = (f"<tool_response>\n{text}\n</tool_response>" for text in ("first", "second"))
    assert service.requests[0].prompt.messages[2]["content"] == f"{one}\n{two}"
    assert service.requests[0].prompt.messages[1]["content"].startswith("Wait.\n<tool_call>")


def test_earlier_calls_of_an_assistant_are_accepted(http: httpx.Client, service: ScriptedService) -> None:
    unread = {"name": "f", "arguments": "not json"}
    cases: list[tuple[Json, str]] = [
        ({"tool_calls": [{"function": unread}]}, json.dumps(unread)),
        ({"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, '{"name": "f", "arguments": {}}'),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "x"}}]}, '"arguments": "x"'),
        ({"function_call": {"name": "f", "arguments": "{}"}}, '{"name": "f", "arguments": {}}'),
        ({"refusal": "I will not."}, "I will not."),
        ({"content": "", "refusal": None, "annotations": [], "audio": None}, ""),
    ]
    user = {"role": "user", "content": "Hi"}
    for message, text in cases:
        messages = [user, {"role": "assistant"} | message, user]
        assert text in asked(http, service, messages=messages).prompt.messages[1]["content"]


def test_a_format_is_a_constraint_and_a_call_may_come_instead(http: httpx.Client, service: ScriptedService) -> None:
    cases: list[tuple[Json, str, str]] = [
        ({"type": "json_object"}, "json_object", ""),
        (schema_format(schema=CITY, strict=True), "json_schema", json.dumps(CITY)),
        (schema_format(schema={"enum": [None, "é"]}, strict=None), "loose_schema", '{"enum": [null, "é"]}'),
    ]
    for wanted, kind, text in cases:
        held = asked(http, service, response_format=wanted).output.constraint
        assert held is not None and (held.kind, held.text) == (kind, text)
        assert text in service.requests[0].prompt.messages[0]["content"], "the model knows what it is held to"
        fields: Json = {"response_format": wanted, "tools": TOOLS}
        assert asked(http, service, **fields, tool_choice="none").output.constraint == held
        required = constraint(asked(http, service, **fields, tool_choice="required"))
        assert required["required"] and "content" not in required
        request = asked(http, service, **fields)
        assert constraint(request)["content"] == {"kind": kind, "text": text}
        description = request.prompt.messages[0]["content"]
        assert "<tools>" in description and ("Answer with JSON" in description) is (wanted["type"] == "json_schema")
    assert "content" not in constraint(asked(http, service, response_format={"type": "text"}, tools=TOOLS))


# ---- the answer to the client ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 7])
def test_calls_stream_as_they_are_answered_whole(http: httpx.Client, service: ScriptedService, size: int) -> None:
    service.script = letters(CALLS, size=size)
    answer = whole(http, tools=TOOLS)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == "Let me look."
    calls = answer["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": ROME},
        {"name": "time", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2 and {call["type"] for call in calls} == {"function"}

    chunks = stream(http, tools=TOOLS)
    assert without_ids(joined(chunks)) == without_ids(answer["message"])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert all(call["index"] in (0, 1) for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ()))


NO_CALL = "1 < 2, and <tool> is a word. \n<"


@pytest.mark.parametrize(
    ("text", "choice", "content", "reason"),
    [
        pytest.param(CALLS.partition("\n")[2], "auto", None, "tool_calls", id="only calls: content is null"),
        pytest.param(NO_CALL, "auto", NO_CALL, "stop", id="no calls"),
        pytest.param(CALLS, "required", "Let me look.", "tool_calls", id="required calls"),
        pytest.param(CALLS, named("weather"), "Let me look.", "stop", id="a named function"),
        pytest.param(CALLS[: CALLS.index("Rome")], "auto", "Let me look.", "stop", id="a stop string within a call"),
    ],
)
def test_content_and_reason_are_openais(
    http: httpx.Client, service: ScriptedService, text: str, choice: object, content: str | None, reason: str
) -> None:
    service.script = letters(text)
    answer = whole(http, tools=TOOLS, tool_choice=choice)["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (content, reason)
    chunks = stream(http, tools=TOOLS, tool_choice=choice)
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    assert content is not None or all(chunk["choices"][0]["delta"].get("content") is None for chunk in chunks)
    assert without_ids(joined(chunks)) == without_ids(answer["message"])


def test_logprobs_have_every_token_of_the_answer_once(http: httpx.Client, service: ScriptedService) -> None:
    for size in (1, 4):
        service.script = letters(CALLS, size=size)
        content = whole(http, tools=TOOLS, logprobs=True)["choices"][0]["logprobs"]["content"]
        assert bytes(byte for item in content for byte in item["bytes"]).decode() == CALLS
        streamed = [chunk["choices"][0]["logprobs"] for chunk in stream(http, tools=TOOLS, logprobs=True)]
        assert [item for one in streamed if one for item in one["content"]] == content


def test_every_choice_has_its_own_calls(http: httpx.Client, service: ScriptedService) -> None:
    service.script = letters(CALLS)
    answers = whole(http, tools=TOOLS, n=3)["choices"]
    assert len({call["id"] for answer in answers for call in answer["message"]["tool_calls"]}) == 6
    chunks = stream(http, tools=TOOLS, n=3)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert without_ids(joined(own)) == without_ids(answers[index]["message"])
        assert [reason for chunk in own if (reason := chunk["choices"][0]["finish_reason"])] == ["tool_calls"]


@pytest.mark.parametrize(("choice", "reason"), [("auto", "function_call"), ({"name": "weather"}, "stop")])
def test_the_older_functions_field_is_answered_in_its_own_form(
    http: httpx.Client, service: ScriptedService, choice: object, reason: str
) -> None:
    service.script = letters(CALLS.rpartition("\n<tool_call>")[0])
    fields = {"functions": [WEATHER["function"]], "function_call": choice}
    answer = whole(http, **fields)["choices"][0]
    assert answer["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "refusal": None,
        "function_call": {"name": "weather", "arguments": ROME},
    }
    assert answer["finish_reason"] == reason
    assert joined(stream(http, **fields)) == answer["message"]
    assert constraint(service.requests[-1])["parallel"] is False


def test_the_tier_is_returned_if_one_was_requested(http: httpx.Client) -> None:
    bodies = [whole(http, service_tier="flex"), *stream(http, service_tier="flex")]
    assert {body["service_tier"] for body in bodies} == {"default"}
    assert "service_tier" not in whole(http)


# ---- the official client --------------------------------------------------------------------------------------------
def test_a_model_writes_calls_in_its_own_format(
    client: openai.OpenAI, http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(MODEL, tools="qwen3_coder")
    monkeypatch.setattr(ScriptedService, "models", lambda _: (own,))
    text = '<tool_call>\n<function=weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n</function>\n</tool_call>'
    service.script = letters(text)
    message = post(http, tools=TOOLS).json()["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": 'New\n"York"'}
    stream = client.chat.completions.create(**BODY, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    calls = [call.function.arguments for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(calls) > 10 and "".join(calls) == message["tool_calls"][0]["function"]["arguments"]
    request = asked(
        http, service, tools=TOOLS, messages=[*BODY["messages"], message, {"role": "user", "content": "And?"}]
    )  # type: ignore[misc]
    assert constraint(request)["format"] == "qwen3_coder"
    system, _, assistant, _ = request.prompt.messages
    assert "<function=<function-name>>" in system["content"] and assistant["content"] == text


class Place(BaseModel):
    city: str


def test_the_official_client_streams_tools_and_parses_formats(client: openai.OpenAI, service: ScriptedService) -> None:
    tools: list[ChatCompletionToolParam] = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("weather", "time")
    ]
    service.script = letters(CALLS)
    with client.chat.completions.stream(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], tools=tools
    ) as events:
        final = events.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Let me look."
    assert [call.function.arguments for call in final.message.tool_calls or ()] == [ROME, "{}"]
    service.script = letters('{"city": "Rome"}')
    parsed = client.chat.completions.parse(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], response_format=Place
    )
    assert parsed.choices[0].message.parsed == Place(city="Rome")
    held = service.requests[-1].output.constraint
    assert held is not None and held.kind == "json_schema" and json.loads(held.text)["required"] == ["city"]


def test_an_agents_turns_go_round(client: openai.OpenAI, service: ScriptedService) -> None:
    """The server's message is sent back unchanged, with the result of its call."""
    service.script = letters(CALLS)
    first = client.chat.completions.create(**BODY, tools=TOOLS).choices[0].message  # type: ignore[call-overload]
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.function.name} for call in first.tool_calls]
    messages = [{"role": "user", "content": "Hi"}, first.model_dump(), *results]
    client.chat.completions.create(**BODY | {"messages": messages}, tools=TOOLS)  # type: ignore[call-overload]
    _, _, assistant, returned = service.requests[-1].prompt.messages
    assert assistant["content"] == CALLS
    assert returned["content"].index("weather") < returned["content"].index("time")
