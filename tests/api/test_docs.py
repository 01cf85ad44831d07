"""docs/api.md tells of every field, and the truth."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from paceline.api.schema import ChatRequest
from tests.api.scripted import ScriptedService
from tests.api.test_requests import fault, post

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
FIELDS = {
    field: word
    for line in DOCS.read_text("utf-8").splitlines()
    if (row := re.match(r"\| (`.*?`) \| (honoured|accepted|refused) \|", line))
    for field in re.findall(r"`(\w+)`", row[1])
    for word in [row[2]]
}
VALUES: dict[str, object] = {"store": True, "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}}


def fields(word: str) -> list[str]:
    return [field for field, told in FIELDS.items() if told == word]


def test_every_field_that_is_read_is_told_of() -> None:
    assert set(fields("honoured") + fields("accepted")) == set(ChatRequest.model_fields)


@pytest.mark.parametrize("field", fields("refused"))
def test_what_is_refused_is_named(http: httpx.Client, field: str) -> None:
    error = fault(post(http, **{field: {"voice": "x"}}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("field", fields("accepted"))
def test_what_is_accepted_changes_nothing(http: httpx.Client, service: ScriptedService, field: str) -> None:
    assert post(http, seed=1).status_code == post(http, seed=1, **{field: VALUES.get(field, "x")}).status_code == 200
    assert service.requests[0] == service.requests[1]
