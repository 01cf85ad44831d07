"""Valid and invalid requests generated from `openapi.json` by schemathesis, against the real application."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lab.openapi import sample
from paceline.api.http.auth import Keyring
from tests.api.scripted import WAIT, running
from tests.api.test_openapi import FILE
from tests.depth import DEPTH

pytestmark = pytest.mark.slow

EXAMPLES = 2 * DEPTH  # of each operation and mode
MAX_TOKENS = 4  # of an answer; higher limits are lowered to it
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

DOCUMENT = json.loads(FILE.read_text(encoding="utf-8"))
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, requests.Session]]:
    directory = tmp_path_factory.mktemp("server")
    with (
        sample(directory, Keyring({"key": None})) as (node, app),
        running(app, node) as url,
        requests.Session() as session,
    ):
        session.trust_env = False
        session.headers["authorization"] = "Bearer key"
        yield url, session


def short(body: Any) -> Any:
    """The same request for the fake model, and for few tokens."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if isinstance(body.get("model"), str):
        body["model"] = "fake"
    for name in LIMITS:
        if isinstance(body.get(name), int) and body[name] > MAX_TOKENS:
            body[name] = MAX_TOKENS
    return body


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_makes_the_server_fail_and_answers_are_as_described(
    server: tuple[str, requests.Session], label: str, mode: GenerationMode
) -> None:
    url, session = server
    operation = OPERATIONS[label]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
        return  # there is nothing that could be invalid

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def exchange(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.body = short(case.body)
        response = case.call(base_url=url, session=session, timeout=WAIT)
        is_too_large = response.status_code == 413  # which is a rejection, too
        rejects = mode is GenerationMode.NEGATIVE and not is_too_large
        checks = [*CHECKS, negative_data_rejection] if rejects else CHECKS
        case.validate_response(response, checks=checks)

    exchange()


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_every_event_of_a_stream_is_as_described(server: tuple[str, requests.Session], route: str) -> None:
    """Requests that are drawn at random seldom have a stream in answer."""
    url, session = server
    asked = {"prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    field = {"completions": "prompt", "chat/completions": "messages", "responses": "input"}[route]
    body = {"model": "fake", "stream": True, "paceline": {"report": True}, field: asked[field]}
    case = OPERATIONS[f"POST /v1/{route}"].Case(body=body, media_type="application/json")
    response = case.call(base_url=url, session=session, timeout=WAIT)
    assert response.status_code == 200 and "data: " in response.text
    case.validate_response(response, checks=CHECKS)
