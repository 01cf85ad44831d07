"""docs/api.md documents every field correctly."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from paceline.api.anthropic import CountRequest, MessagesRequest
from paceline.api.chat.request import ChatRequest
from paceline.api.completions import CompletionRequest
from paceline.api.ollama import ChatBody, EmbedBody, GenerateBody
from paceline.api.responses.request import ResponseRequest
from paceline.api.texts import DetokenizeRequest, EmbeddingRequest, RerankRequest, TokenizeRequest
from tests.api.conftest import BODY
from tests.api.generation.test_request import fault, post
from tests.api.scripted import ScriptedService
from tests.requests import changed

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = {
    text.split("\n", 1)[0]: text
    for text in re.split(r"^##+ POST ", (DOCS / "api.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
}
VALUES: dict[str, object] = {"store": True, "metadata": {"a": "b"}}


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


def test_refused_fields_are_named(http: httpx.Client) -> None:
    asked = {"/v1/responses": {"model": "scripted", "input": "Hi"}, "/v1/chat/completions": BODY, **OTHERS}
    for path, body in asked.items():
        for field in fields("refused", path):
            response = http.post(path, json=body | {field: {"id": "x"}})
            assert response.status_code == 400 and field in response.text
            if path not in OTHERS:
                assert (fault(response)["param"], fault(response)["code"]) == (field, "unsupported_parameter")


def test_accepted_fields_change_nothing(http: httpx.Client, service: ScriptedService) -> None:
    assert post(http, seed=1).status_code == 200
    for field in fields("accepted"):
        assert post(http, seed=1, **{field: VALUES.get(field, "x")}).status_code == 200
        assert service.requests[0] == service.requests[-1], field


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


@pytest.mark.parametrize("path", OTHERS)
def test_accepted_fields_of_other_apis_change_nothing(http: httpx.Client, service: ScriptedService, path: str) -> None:
    seed = {"options": {"seed": 1, "temperature": 0}, "temperature": 0}
    for more in ({}, *({field: OTHER_VALUES.get(field, "x")} for field in fields("accepted", path))):
        assert http.post(path, json=OTHERS[path] | seed | more).status_code == 200
        first, last = service.requests[0], service.requests[-1]
        assert changed(first, sampling=last.wish.sampling) == last, more  # without a seed one is drawn for each
