"""Form and end of an answer by every server's names, on every surface; and what this server sends, sent back to it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from paceline.core.sampling.sampler import Constraint
from paceline.runtime.service import Citation, GenerateEvent, TextDelta, WorkflowStep
from tests.api.conftest import BODY
from tests.api.generation.test_request import Json, fault, post
from tests.api.scripted import Script, ScriptedService, answering, done

USER = {"role": "user", "content": "Hi"}
SURFACES: dict[str, Json] = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"model": "scripted", "prompt": [72, 105], "max_tokens": 50},
    "/v1/responses": {"model": "scripted", "input": "Hi"},
    "/v1/messages": {"model": "scripted", "max_tokens": 50, "messages": [USER]},
    "/api/chat": {"model": "scripted", "messages": [USER], "stream": False},
    "/api/generate": {"model": "scripted", "prompt": "Hi", "stream": False},
}
EVERYWHERE = pytest.mark.parametrize("path", SURFACES)
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
GBNF = 'root ::= "a" [0-9]+'
FORMS: list[tuple[Json, str, str]] = [
    ({"guided_json": SCHEMA}, "json_schema", TEXT),
    ({"guided_json": TEXT}, "json_schema", TEXT),
    ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
    ({"guided_choice": ["yes", "nö"]}, "choice", '["yes", "nö"]'),
    ({"guided_grammar": GBNF}, "grammar", GBNF),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "disable_fallback": False}}, "json_schema", TEXT),
    ({"structured_outputs": {"regex": "[ab]+", "disable_any_whitespace": False}}, "regex", "[ab]+"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ({"structured_outputs": {"grammar": GBNF}}, "grammar", GBNF),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"json_schema": SCHEMA}, "json_schema", TEXT),
    ({"grammar": GBNF}, "grammar", GBNF),
    ({"grammar": {"type": "regex", "value": "[ab]+"}}, "regex", "[ab]+"),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json_schema", TEXT),
    ({"regex": "[ab]+"}, "regex", "[ab]+"),
    ({"ebnf": GBNF}, "grammar", GBNF),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", TEXT),
    ({"response_format": {"type": "regex", "pattern": "[ab]+"}}, "regex", "[ab]+"),
    ({"response_format": {"type": "regex", "regex": "[ab]+"}}, "regex", "[ab]+"),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, "grammar", GBNF),
]


def ask(http: httpx.Client, path: str, **fields: object) -> httpx.Response:
    return http.post(path, json=SURFACES[path] | fields)


@EVERYWHERE
def test_a_form_by_whatever_name_holds_the_answer(http: httpx.Client, service: ScriptedService, path: str) -> None:
    for fields, kind, text in FORMS if "chat" in path else FORMS[::6]:
        response = ask(http, path, **fields)
        assert response.status_code == 200, response.text
        held = service.requests[-1].output.constraint
        assert held is not None and (held.kind, held.text) == (kind, text), fields


REFUSED: list[Json] = [
    {"guided_whitespace_pattern": " *"},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
    {"structural_tag": "{}"},
    {"response_format": {"type": "structural_tag", "structures": []}},
    {"grammar": {"type": "regex", "value": {}}},
    {"guided_json": "not JSON"},
    {"guided_regex": 7},
    {"guided_regex": "x" * 65_537},
    {"bad_words": ["a"]},
    {"stop_token_ids": [256]},
    {"min_tokens": -1},
]


@EVERYWHERE
def test_a_form_that_is_not_kept_to_is_refused_by_name(http: httpx.Client, service: ScriptedService, path: str) -> None:
    for fields in REFUSED if "chat" in path else REFUSED[::4]:
        response = ask(http, path, **fields)
        assert response.status_code == 400 and next(iter(fields)) in response.text, response.text
    assert not service.requests


@EVERYWHERE
def test_two_forms_are_refused_and_empty_ones_ask_for_nothing(
    http: httpx.Client, service: ScriptedService, path: str
) -> None:
    both = ask(http, path, guided_regex="a", guided_choice=["a"])
    assert both.status_code == 400 and "guided_regex and guided_choice" in both.text
    empty = {
        "guided_regex": "",
        "grammar": "",
        "guided_choice": [],
        "bad_words": [],
        "include_stop_str_in_output": False,
    }
    assert ask(http, path, **empty, guided_json=None, response_format={"type": "text"}).status_code == 200
    assert service.requests[-1].output.constraint is None


@pytest.mark.parametrize("path", [path for path in SURFACES if not path.startswith("/api/")])
def test_a_form_as_ollama_takes_it_is_refused_elsewhere(
    http: httpx.Client, service: ScriptedService, path: str
) -> None:
    response = ask(http, path, format=SCHEMA)
    assert response.status_code == 400 and "send response_format" in response.text
    assert not service.requests


def test_a_form_by_the_surfaces_own_name_and_another_are_refused(http: httpx.Client) -> None:
    own: dict[str, Json] = {
        "/v1/responses": {"text": {"format": {"type": "json_object"}}},
        "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "/api/chat": {"format": "json"},
    }
    for path, fields in own.items():
        for other in ({"guided_regex": "a"}, {"response_format": {"type": "json_object"}}):
            assert ask(http, path, **fields, **other).status_code == 400


@EVERYWHERE
def test_ends_reach_the_generation(http: httpx.Client, service: ScriptedService, path: str) -> None:
    fields = {"min_tokens": 5, "ignore_eos": True, "stop_token_ids": [9, 3, 9]}
    assert ask(http, path, **fields).status_code == 200
    asked = service.requests[-1]
    assert asked.output.constraint == Constraint("text", min_tokens=5, ignore_eos=True, stop_ids=(3, 9))
    assert asked.output.stop_token_ids == (9, 3, 9)
    assert ask(http, path, stop_token_ids=[9]).status_code == 200
    assert service.requests[-1].output.constraint is None and service.requests[-1].output.stop_token_ids == (9,)
    assert ask(http, path, min_tokens=2, guided_regex="a*").status_code == 200
    assert service.requests[-1].output.constraint == Constraint("regex", "a*", min_tokens=2)


def test_a_form_beside_tools_is_that_of_an_answer_without_calls(http: httpx.Client, service: ScriptedService) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    post(http, tools=tools, guided_choice=["a", "b"], min_tokens=1)
    held = service.requests[0].output.constraint
    assert held is not None and (held.kind, held.min_tokens) == ("tools", 1)
    assert json.loads(held.text)["content"] == {"kind": "choice", "text": '["a", "b"]'}
    assert fault(post(http, tools=tools, guided_grammar=GBNF))["param"] == "guided_grammar"


def test_only_an_answer_that_must_have_a_form_has_a_limit_of_its_own(
    http: httpx.Client, service: ScriptedService
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    cases: list[tuple[Json, int | None]] = [
        ({}, None),
        ({"min_tokens": 3}, None),
        ({"tools": tools}, None),
        ({"tools": tools, "tool_choice": "required"}, 4096),
        ({"tools": tools, "guided_regex": "a*"}, 4096),
        ({"response_format": {"type": "json_object"}}, 4096),
    ]
    for fields, limit in cases:
        post(http, **fields)
        assert (service.requests[-1].output.default_tokens, service.requests[-1].output.max_tokens) == (limit, None)


# ---- an answer that the client begins -------------------------------------------------------------------------------
BEGUN: list[Json] = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_an_assistants_message_at_the_end_is_gone_on_from(
    http: httpx.Client, service: ScriptedService, path: str
) -> None:
    assert ask(http, path, messages=BEGUN).status_code == 200
    assert list(service.requests[-1].prompt.messages) == BEGUN


def test_whether_it_is_may_be_said(http: httpx.Client, service: ScriptedService) -> None:
    called: Json = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    cases: list[tuple[list[Json], Json, bool]] = [
        (BEGUN, {}, True),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}, True),
        (BEGUN, {"add_generation_prompt": False}, True),
        (BEGUN, {"continue_final_message": False}, False),
        (BEGUN, {"add_generation_prompt": True}, False),
        ([BEGUN[0], called], {}, False),
    ]
    for messages, fields, is_begun in cases:
        assert post(http, messages=messages, **fields).status_code == 200
        told = service.requests[-1].prompt.messages
        assert (told[-1]["role"], told[-1]["content"] != "") == ("assistant", is_begun)
        assert len(told) == len(messages) + (not is_begun)


def test_what_cannot_be_gone_on_from_is_refused(http: httpx.Client) -> None:
    begun: Json = {"messages": BEGUN}
    for fields in (
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        begun | {"continue_final_message": True, "add_generation_prompt": True},
        begun | {"continue_final_message": False, "add_generation_prompt": False},
    ):
        assert fault(post(http, **fields))["param"] in ("add_generation_prompt", "continue_final_message")


def test_a_response_goes_on_from_its_input_only_where_that_is_said(
    http: httpx.Client, service: ScriptedService
) -> None:
    for fields, last in (({}, ""), ({"continue_final_message": True}, "It is")):
        assert ask(http, "/v1/responses", input=BEGUN, **fields).status_code == 200
        assert service.requests[-1].prompt.messages[-1] == {"role": "assistant", "content": last}


# ---- what this server sends, sent back ------------------------------------------------------------------------------
CITED = (Citation("cloud", "a.md", "A passage.", 0.5), Citation("device", "", "", 0.4))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": '
STEP = TextDelta("", 0, step=WorkflowStep("search", "done", "cpu", 0.1, "two passages"))
ANSWERS: dict[str, list[GenerateEvent]] = {
    "text": answering("Hello", " there."),
    "nothing": [done("stop")],
    "cited text": answering("Hello", citations=CITED),
    "steps": [STEP, *answering("Hello")],
    "steps alone": [STEP, done("length")],
    "call": answering(CALL, "true}}\n</tool_call>"),
    "text and call": answering("I look.\n", CALL + "true}}\n</tool_call>"),
    "call cut in its name": [TextDelta('<tool_call>\n{"na', 3), done("length")],
    "call cut in its arguments": [TextDelta(CALL, 3), done("length")],
}
FUNCTION: Json = {"name": "f", "parameters": {"type": "object"}}
TOOLS: dict[str, object] = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "/v1/messages": [{"name": "f", "input_schema": {"type": "object"}}],
    "/api/chat": [{"type": "function", "function": FUNCTION}],
}
SENT: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {  # the field it goes back in, and what that is of an answer
    "/v1/chat/completions": ("messages", lambda answer: [answer["choices"][0]["message"]]),
    "/v1/responses": ("input", lambda answer: answer["output"]),
    "/v1/messages": ("messages", lambda answer: [{name: answer[name] for name in ("role", "content")}]),
    "/api/chat": ("messages", lambda answer: [answer["message"]]),
}


@pytest.mark.parametrize("path", SENT)
def test_whatever_is_sent_is_taken_back(http: httpx.Client, service: ScriptedService, path: str) -> None:
    field, own = SENT[path]
    for tools, events in itertools.product(({}, {"tools": TOOLS[path]}), ANSWERS.values()):
        service.script = Script(events)
        answer = ask(http, path, **tools, **{field: [USER]})
        assert answer.status_code == 200, answer.text
        for after in ([{"role": "user", "content": "Go on."}], []):
            again = ask(http, path, **tools, **{field: [USER, *own(answer.json()), *after]})
            assert again.status_code == 200, (own(answer.json()), again.text)


def test_the_older_form_of_a_call_is_taken_back(http: httpx.Client, service: ScriptedService) -> None:
    for name in ("call", "call cut in its name"):
        service.script = Script(ANSWERS[name])
        message = post(http, functions=[FUNCTION]).json()["choices"][0]["message"]
        assert post(http, messages=[USER, message, USER], functions=[FUNCTION]).status_code == 200


def test_a_stream_has_the_usage_so_far_in_every_event_if_that_is_asked_for(
    http: httpx.Client, service: ScriptedService
) -> None:
    service.script = Script([TextDelta("Hello", 1), TextDelta(" there", 2), done()])
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in ("/v1/chat/completions", "/v1/completions"):
        text = ask(http, path, stream=True, stream_options=options).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[-4:] == [1, 3, 3, 3] and all(count == 0 for count in counts[:-4])
        assert {chunk["usage"]["total_tokens"] - chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]} <= {2, 7}
