"""Ollama's API: lines of JSON, options, and what its clients ask before they chat."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import httpx
import pytest

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring, StoredKey
from paceline.runtime.service import GenerateEvent, TextDelta, TokenLogprob, WorkflowStep
from tests.api.scripted import FreshKeys, Script, ScriptedService, answering, client_of, done, running

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIMES = ("created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
STEP = WorkflowStep("search", "done", "cpu", 0.1, "2 passages")
LOGPROB = TokenLogprob("a", -0.5, (97,))


def chat(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/api/chat", json={"model": "scripted", "messages": HI, **fields})


def generate(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/api/generate", json={"model": "scripted", "prompt": "Hi", **fields})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson" and "connection" not in response.headers
    return [json.loads(line) for line in response.text.splitlines()]


SCRIPTS: dict[str, list[GenerateEvent]] = {
    "text": answering("Hel", "lo"),
    "nothing": answering(),
    "cut": [TextDelta("a", 1), done("length")],
    "steps": [TextDelta("", 0, step=STEP), TextDelta("b", 1), done()],
    "degraded": answering("a", degraded="device_lost"),
    "logprobs": [TextDelta("a", 1, logprobs=((LOGPROB, (LOGPROB,)),)), done()],
}


def timeless(body: dict[str, Any]) -> dict[str, Any]:
    assert body["created_at"].endswith("Z") and all(body[name] >= 0 for name in TIMES[1:])
    return {name: value for name, value in body.items() if name not in TIMES}


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_of_a_chat_add_up_to_the_whole_answer(http: httpx.Client, service: ScriptedService, name: str) -> None:
    service.script = Script(SCRIPTS[name])
    *parts, last = lines(chat(http))
    assert all(part["done"] is False for part in parts) and last["done"] is True
    message: dict[str, Any] = {"role": "assistant", "content": "".join(part["message"]["content"] for part in parts)}
    if thinking := "".join(part["message"].get("thinking", "") for part in parts):
        message["thinking"] = thinking
    logprobs = [item for part in parts for item in part.get("logprobs", ())]
    joined = timeless(last) | {"message": message} | ({"logprobs": logprobs} if logprobs else {})
    assert joined == timeless(chat(http, stream=False).json())


def test_lines_of_a_generation_add_up_to_the_whole_answer(http: httpx.Client, service: ScriptedService) -> None:
    for events in SCRIPTS.values():
        service.script = Script(events)
        *parts, last = lines(generate(http))
        whole = timeless(generate(http, stream=False).json())
        assert whole["response"] == "".join(part["response"] for part in parts)
        assert whole["done_reason"] == last["done_reason"]
        assert (whole["prompt_eval_count"], whole["eval_count"]) == (7, 3)


@pytest.mark.parametrize("stream", [True, False])
def test_calls_come_whole_with_their_arguments_as_an_object(
    http: httpx.Client, service: ScriptedService, stream: bool
) -> None:
    service.script = Script(answering("I look. ", CALL[:30], CALL[30:], CALL))
    response = chat(http, tools=[TOOL], stream=stream)
    bodies = lines(response) if stream else [response.json()]
    calls = [call for body in bodies for call in body["message"].get("tool_calls", ())]
    assert calls == [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}] * 2
    assert "".join(body["message"]["content"] for body in bodies) == "I look."


def test_a_call_that_was_cut_has_what_was_written_of_it(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([TextDelta(CALL.partition("}}")[0] + ', "unit": "ce', 1), done("length")])
    (call,) = chat(http, tools=[TOOL], stream=False).json()["message"]["tool_calls"]
    assert call == {"function": {"name": "weather", "arguments": {"city": "Paris"}}}


def test_options_are_sampling_parameters(http: httpx.Client, service: ScriptedService) -> None:
    options = {"num_predict": 5, "temperature": 0.3, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 42}
    penalties = {"repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    chat(http, options=options | penalties | {"stop": ["END"], "num_ctx": 4096, "num_gpu": 1, "mirostat": 0})
    (asked,) = service.requests
    sampling = asked.wish.sampling
    assert (asked.output.max_tokens, asked.output.stop, asked.wish.seeded) == (5, ("END",), True)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.3, 4, 0.5, 0.1)
    assert (sampling.seed, sampling.repetition_penalty) == (42, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)


def test_numbers_that_mean_no_limit_and_no_seed_are_read_so(http: httpx.Client, service: ScriptedService) -> None:
    chat(http, options={"num_predict": -1, "seed": -1})
    assert service.requests[0].output.max_tokens is None and not service.requests[0].wish.seeded


@pytest.mark.parametrize(
    ("wanted", "kind"), [("json", "json_object"), ({"type": "object", "properties": {}}, "loose_schema"), ("", None)]
)
def test_a_format_holds_the_answer(
    http: httpx.Client, service: ScriptedService, wanted: object, kind: str | None
) -> None:
    generate(http, format=wanted)
    constraint = service.requests[0].output.constraint
    assert (None if constraint is None else constraint.kind) == kind


def test_earlier_calls_and_results_are_part_of_the_chat(http: httpx.Client, service: ScriptedService) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    chat(http, messages=messages)
    told = service.requests[0].prompt.messages
    assert '"city": "Paris"' in told[1]["content"] and "rain" in told[2]["content"]


def test_a_generation_has_a_system_message_and_names_may_have_the_tag_latest(
    http: httpx.Client, service: ScriptedService
) -> None:
    body = generate(http, model="scripted:latest", system="Be kind.", keep_alive="5m", stream=False).json()
    assert body["model"] == "scripted:latest"
    assert [message["content"] for message in service.requests[0].prompt.messages] == ["Be kind.", "Hi"]


def test_refusals_are_one_sentence(http: httpx.Client) -> None:
    cases: list[tuple[str, dict[str, object], str]] = [
        ("/api/chat", {"model": "nobody"}, "nobody"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
        ("/api/chat", {"think": True}, "thinking"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"options": {"temperature": 900}}, "options.temperature"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"paceline": {"documnts": 1}}, "paceline.documnts"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"images": ["aGk="]}, "images"),
        ("/api/generate", {"template": "x"}, "template"),
        ("/api/generate", {"context": [1]}, "context"),
        ("/api/generate", {"raw": True, "format": "json"}, "format"),
        ("/api/embed", {"model": "scripted", "input": "a"}, "makes no embeddings"),
        ("/api/embed", {"model": "scripted-embedder", "input": "a", "truncate": False}, "truncate"),
        ("/api/embed", {"model": "scripted-embedder", "input": "a", "dimensions": 3}, "dimensions"),
        ("/api/show", {"model": None}, "model"),
        ("/api/pull", {}, "paceline serve --model"),
    ]
    for path, fields, words in cases:
        response = http.post(path, json={"model": "scripted", "messages": HI, "prompt": "Hi"} | fields)
        assert response.status_code in (400, 404)
        assert set(response.json()) == {"error"} and words in response.json()["error"], fields


@pytest.mark.parametrize(("keep", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0", "unload")])
def test_a_request_without_a_prompt_loads_the_model(
    http: httpx.Client, service: ScriptedService, keep: object, reason: str
) -> None:
    for response in (chat(http, messages=[], keep_alive=keep), generate(http, prompt="", keep_alive=keep)):
        assert response.json()["done_reason"] == reason and response.json()["done"] is True
    assert not service.requests


def test_models_are_listed_as_ollama_lists_them(http: httpx.Client) -> None:
    listed = [model["name"] for model in http.get("/api/tags").json()["models"]]
    assert listed == [model["id"] for model in http.get("/v1/models").json()["data"]]
    loaded = {model["name"] for model in http.get("/api/ps").json()["models"]}
    assert loaded == {name for name in listed if not name.startswith("org/second")}, "that one is not in memory"
    shown = http.post("/api/show", json={"model": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096
    assert http.post("/api/show", json={"name": "scripted-embedder"}).json()["capabilities"] == ["embedding"]
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what editors ask for at least


def test_raw_prompts_and_embeddings_equal_those_of_the_openai_surface(node_url: str) -> None:
    with client_of(node_url) as http:
        greedy = {"options": {"temperature": 0, "num_predict": 9}, "raw": True, "stream": False}
        ours = http.post("/api/generate", json={"model": "fake", "prompt": "abc", **greedy}).json()["response"]
        openais = {"model": "fake", "prompt": "abc", "temperature": 0, "max_tokens": 9}
        assert ours == http.post("/v1/completions", json=openais).json()["choices"][0]["text"]
        asked = {"model": "hash", "input": ["one", "two"]}
        embedded = http.post("/api/embed", json=asked).json()["embeddings"]
        theirs = http.post("/v1/embeddings", json=asked).json()["data"]
        assert embedded == [each["embedding"] for each in theirs]
        one = http.post("/api/embeddings", json={"model": "hash", "prompt": "one"}).json()
        assert one == {"embedding": embedded[0]}
        assert http.post("/api/embed", json={"model": "hash", "input": []}).json()["embeddings"] == []


def test_a_key_without_the_scope_of_completions_may_not_continue_raw_prompts(service: ScriptedService) -> None:
    key = StoredKey.of(sha256(b"narrow").digest(), scopes=frozenset({"chat"}))
    app = create_app(service, keyring=Keyring({}, FreshKeys(key)))
    with running(app) as url, client_of(url, "narrow") as http:
        assert generate(http).status_code == 200
        refused = generate(http, raw=True)
        assert refused.status_code == 403 and "completions" in refused.json()["error"]
