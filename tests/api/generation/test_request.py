"""Request fields: accepted as OpenAI's clients send them, or refused by name in OpenAI's shape."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import httpx

from tests.api.conftest import BODY
from tests.api.declared import Declared
from tests.api.scripted import ScriptedService

Json: TypeAlias = dict[str, object]


def post(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/chat/completions", json=BODY | fields)


def fault(response: httpx.Response, status: int = 400) -> dict[str, str | None]:
    """The error in the envelope; all four keys must be there."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def told(response: httpx.Response, route: Declared, status: int = 400) -> str:
    """The message of an error, in the shape of the route's surface."""
    if route.errors is None:
        return str(fault(response, status)["message"])
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    route.errors.model.model_validate(response.json(), strict=True)
    error = response.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


# fmt: off
NULLABLE = [
    "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "n", "logprobs", "top_logprobs", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "verbosity", "reasoning_effort", "modalities", "prediction", "audio", "web_search_options",
    "functions", "function_call", "top_k", "min_p", "paceline", "chat_template_kwargs", "enable_thinking",
]
# fmt: on


def schema_format(**fields: object) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}} | fields}


def nested(depth: int) -> Json:
    schema: Json = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_an_explicit_null_means_absent(http: httpx.Client, service: ScriptedService) -> None:
    messages = [{"role": "user", "content": "Hi", "name": None, "tool_calls": None, "function_call": None}]
    paceline = {"strategy": None, "device": None, "privacy": None, "documents": None, "report": None}
    inside = {"messages": messages, "paceline": paceline, "stream": True, "stream_options": {"include_usage": None}}
    for fields in (dict.fromkeys(NULLABLE), inside):
        response = post(http, **fields)
        assert response.status_code == 200, response.text
    asked = service.requests[0]
    assert (asked.output.max_tokens, asked.output.stop) == (None, ())
    assert (asked.wish.strategy, asked.wish.documents) == ("auto", 2)
    assert asked.wish.sampling.temperature == asked.wish.sampling.top_p == 1.0


def test_variables_of_the_chat_template_are_taken_as_other_servers_take_them(
    http: httpx.Client, service: ScriptedService
) -> None:
    for fields in ({"chat_template_kwargs": {"a": [1]}, "enable_thinking": False}, {}):
        assert post(http, **fields).status_code == 200
    assert [dict(request.prompt.template) for request in service.requests] == [{"enable_thinking": False, "a": [1]}, {}]


def test_a_temperature_whose_inverse_is_of_no_use_is_greedy(http: httpx.Client, service: ScriptedService) -> None:
    for temperature in (5e-324, 1e-310, 9e-7):
        assert post(http, temperature=temperature).status_code == 200
        assert service.requests[-1].wish.sampling.temperature == 0.0


def test_where_the_request_is_silent_the_model_s_recommendations_hold(
    http: httpx.Client, service: ScriptedService
) -> None:
    more: Json = {"model": "org/second"}
    post(http, **more)
    post(http, **more, temperature=0, top_k=-1, repetition_penalty=1.0)
    post(http)
    silent, explicit, plain = (request.wish.sampling for request in service.requests)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.7, 0.8, 20, 0.0)
    assert silent.repetition_penalty == 1.05
    assert (explicit.temperature, explicit.top_p, explicit.top_k, explicit.repetition_penalty) == (0.0, 0.8, 0, 1.0)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    made = http.post("/v1/responses", json={"model": "org/second", "input": "x", "top_p": 0.5}).json()
    assert (made["temperature"], made["top_p"]) == (0.7, 0.5), "and a response tells them"


def test_hints_and_fields_of_other_servers_are_accepted(http: httpx.Client) -> None:
    for fields in (
        {"service_tier": "auto", "reasoning_effort": "none", "prediction": {"content": "x"}},
        {"repetition_penalty": 1.1, "chat_template_kwargs": {}, "mirostat": 2, "unheard_of": [1]},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": None, "functions": [], "function_call": "none"},
        {"service_tier": "flex", "prompt_cache_retention": "24h", "metadata": {str(i): "" for i in range(16)}},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"top_k": -1},
        {"stop": []},
    ):
        assert post(http, **fields).status_code == 200, fields


def test_unsupported_fields_and_parts_are_refused_by_name(http: httpx.Client, service: ScriptedService) -> None:
    cases: list[tuple[str, Json]] = [
        ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools[1].type", {"tools": [{"function": {"name": "f"}}, {"type": "web_search"}], "tool_choice": "none"}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("audio", {"audio": {"voice": "x"}}),
        ("web_search_options", {"web_search_options": {}}),
    ]
    for kind in ("image_url", "input_audio", "sculpture"):
        content = [{"type": "text", "text": "Look:"}, {"type": kind, kind: {"url": "data:,"}}]
        cases.append(("messages[0].content[1]", {"messages": [{"role": "user", "content": content}]}))
    for param, fields in cases:
        error = fault(post(http, **fields))
        code = "unsupported_content" if "messages" in fields else "unsupported_parameter"
        assert (error["param"], error["code"]) == (param, code)
    for fields in ({"messages": ["Hi"]}, {"tools": [5]}, {"stream_options": "yes"}, {"paceline": True}):
        assert str(fault(post(http, **fields))["message"]).endswith(" cannot be used: input should be an object.")
    error = fault(post(http, model="gpt-4o"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert not service.requests


def test_a_bad_field_is_named_and_starts_nothing(http: httpx.Client, service: ScriptedService) -> None:
    cases: list[tuple[str, Json]] = [
        ("temperature", {"temperature": 100.1}),
        ("temperature", {"temperature": "1"}),
        ("repetition_penalty", {"repetition_penalty": 1e-300}),
        ("metadata", {"metadata": {str(i): "" for i in range(17)}}),
        ("metadata.k", {"metadata": {"k": "v" * 513}}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema.schema", {"response_format": schema_format(schema=None)}),
        ("response_format.json_schema.name", {"response_format": schema_format(name="two words")}),
        ("response_format.json_schema.schema", {"response_format": schema_format(schema={"title": "x" * 65_536})}),
        ("response_format.json_schema.schema", {"response_format": schema_format(schema=nested(100))}),
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * 5000}}),
        ("chat_template_kwargs", {"chat_template_kwargs": nested(100)}),
        ("max_completion_tokens", {"max_completion_tokens": "9"}),
        ("seed", {"seed": 2**63}),
        ("stop", {"stop": [str(number) for number in range(65)]}),
        ("stop[1]", {"stop": ["a", 7]}),
        ("stop[0]", {"stop": ["x" * 257]}),
        ("logit_bias", {"logit_bias": {"256": 1}}),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(301)}}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "Hi"}] * 1001}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "Hi"}]}),
        ("messages[1].content", {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": None}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("model", {"model": None}),
        ("paceline.stratgy", {"paceline": {"stratgy": "auto"}}),
        ("paceline.strategy", {"paceline": {"strategy": "telepathy"}}),
    ]
    for param, fields in cases:
        assert fault(post(http, **fields))["param"] == param, fields
    assert not service.requests


def test_parts_are_joined_and_developer_is_system(http: httpx.Client, service: ScriptedService) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Why?"},
    ]
    assert post(http, messages=messages).status_code == 200
    assert service.requests[0].prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    )


def test_every_sampling_field_reaches_the_service(http: httpx.Client, service: ScriptedService) -> None:
    fields: Json = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": -2}
    fields |= {"frequency_penalty": 2, "logit_bias": {"0": -100, "255": 100}, "seed": -5, "stop": "END"}
    response = post(http, **fields, max_tokens=9)
    assert response.status_code == 200, response.text
    asked = service.requests[0]
    sampling = asked.wish.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
    assert (sampling.logit_bias, sampling.seed) == ({0: -100.0, 255: 100.0}, -5)
    assert (asked.output.stop, asked.output.max_tokens) == (("END",), 9)
    for logprobs, others in ((True, 0), (False, None)):
        assert post(http, logprobs=logprobs).status_code == 200
        assert service.requests[-1].wish.top_logprobs == others


def test_every_int64_is_a_seed_one_is_drawn_where_none_is_given_and_each_choice_has_its_own(
    http: httpx.Client, service: ScriptedService
) -> None:
    seeds = [0, -1, 2**63 - 1, -(2**63)]
    for seed in (*seeds, None, None, None):
        assert post(http, seed=seed).status_code == 200
    found = [request.wish.sampling.seed for request in service.requests]
    assert found[:4] == seeds and len(set(found)) == 7
    service.requests.clear()
    for seed in (1, 2, 2**63 - 1):
        assert post(http, seed=seed, n=3).status_code == 200
    found = [asked.wish.sampling.seed for asked in service.requests]
    assert found[::3] == [1, 2, 2**63 - 1] and len(set(found)) == 9
    assert found[1] == int.from_bytes(hashlib.sha256(b"1/1").digest()[:8], "little", signed=True)
    assert post(http, seed=found[1]).status_code == 200
    assert service.requests[-1].wish.sampling.seed == found[1]


def test_the_newer_limit_wins_and_a_limit_above_the_context_is_clamped(
    http: httpx.Client, service: ScriptedService
) -> None:
    assert post(http, max_tokens=5, max_completion_tokens=6).status_code == 200
    assert post(http, max_tokens=10**30).status_code == 200
    assert [asked.output.max_tokens for asked in service.requests] == [6, 4096]


def test_our_object_reaches_the_service(http: httpx.Client, service: ScriptedService) -> None:
    paceline = {"strategy": "aggregate", "device": "phone", "privacy": "local-only", "documents": 0}
    assert post(http, paceline=paceline | {"on_device_loss": "fail"}).status_code == 200
    asked = service.requests[0]
    assert (asked.wish.strategy, asked.joining.device, asked.wish.privacy) == ("aggregate", "phone", "local-only")
    assert (asked.wish.documents, asked.joining.on_loss) == (0, "fail")
