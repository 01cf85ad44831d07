"""docs/api.md documents every field correctly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from paceline.api.anthropic.request import CountRequest, MessagesRequest
from paceline.api.chat.request import ChatRequest
from paceline.api.completions import CompletionRequest
from paceline.api.embeddings import EmbeddingRequest
from paceline.api.ollama.request import ChatBody, EmbedBody, GenerateBody
from paceline.api.rerank import RerankRequest
from paceline.api.responses.request import ResponseRequest
from paceline.api.tokens import DetokenizeRequest, TokenizeRequest
from tests.api.generation.test_request import fault, post
from tests.api.scripted import ScriptedService

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = {
    text.split("\n", 1)[0]: text
    for text in re.split(r"^##+ POST ", (DOCS / "api.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
}
VALUES: dict[str, object] = {"store": True, "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}}


def fields(word: str, path: str = "/v1/chat/completions") -> list[str]:
    return [
        field
        for line in SECTIONS[path].splitlines()
        if (row := re.match(rf"\| (`.*?`) \| {word} \|", line))
        for field in re.findall(r"`(\w+)`", row[1])
    ]


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/chat/completions", ChatRequest),
        ("/v1/responses", ResponseRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/embeddings", EmbeddingRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountRequest),
        ("/v1/rerank", RerankRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
        ("/api/chat", ChatBody),
        ("/api/generate", GenerateBody),
        ("/api/embed", EmbedBody),
    ],
)
def test_every_field_is_documented(path: str, schema: type[BaseModel]) -> None:
    assert sorted(fields("honoured", path) + fields("accepted", path)) == sorted(schema.model_fields)


@pytest.mark.parametrize("field", fields("refused", "/v1/responses"))
def test_fields_that_responses_refuse_are_named(http: httpx.Client, field: str) -> None:
    body = {"model": "scripted", "input": "Hi", field: {"id": "x"}}
    error = fault(http.post("/v1/responses", json=body))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("field", fields("refused"))
def test_refused_fields_are_named(http: httpx.Client, field: str) -> None:
    error = fault(post(http, **{field: {"voice": "x"}}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("field", fields("accepted"))
def test_accepted_fields_change_nothing(http: httpx.Client, service: ScriptedService, field: str) -> None:
    assert post(http, seed=1).status_code == post(http, seed=1, **{field: VALUES.get(field, "x")}).status_code == 200
    assert service.requests[0] == service.requests[1]


OTHERS: dict[str, dict[str, object]] = {
    "/v1/messages": {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "stream": False},
    "/api/generate": {"model": "scripted", "prompt": "Hi", "stream": False},
}
OTHER_VALUES: dict[str, object] = {
    **{name: {"type": "x"} for name in ("metadata", "cache_control", "context_management")},
    "truncate": True,
    "shift": True,
    "think": False,
}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in OTHERS for field in fields("refused", path)])
def test_fields_that_other_apis_refuse_are_named(http: httpx.Client, path: str, field: str) -> None:
    response = http.post(path, json=OTHERS[path] | {field: ["x"]})
    assert response.status_code == 400 and field in response.text


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in OTHERS for field in fields("accepted", path)])
def test_accepted_fields_of_other_apis_change_nothing(
    http: httpx.Client, service: ScriptedService, path: str, field: str
) -> None:
    seed = {"options": {"seed": 1, "temperature": 0}, "temperature": 0}
    for more in ({}, {field: OTHER_VALUES.get(field, "x")}):
        assert http.post(path, json=OTHERS[path] | seed | more).status_code == 200
    first, second = service.requests
    assert replace(first, sampling=second.sampling) == second  # without a seed one is drawn for each
