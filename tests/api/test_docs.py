"""docs/api.md documents every field correctly."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from paceline.api.chat.schema import ChatRequest
from paceline.api.completions.request import CompletionRequest
from paceline.api.embeddings.endpoint import EmbeddingRequest
from paceline.api.responses.schema import ResponseRequest
from tests.api.generation.test_request import fault, post
from tests.api.scripted import ScriptedService

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
SECTIONS = {
    text.split("\n", 1)[0]: text for text in re.split(r"^## POST ", DOCS.read_text("utf-8"), flags=re.MULTILINE)[1:]
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
