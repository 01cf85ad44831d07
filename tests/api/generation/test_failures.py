"""Failures before, during and around an answer, and clients that leave."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from paceline.errors import EngineError, LinkClosed, PacelineError, RequestError
from paceline.runtime.service import TextDelta
from tests.api.chat.test_output import events
from tests.api.conftest import BODY
from tests.api.generation.test_request import fault, post
from tests.api.scripted import Script, ScriptedService, Signal, answering, done


def test_a_refusal_is_a_plain_answer_even_when_a_stream_was_asked_for(
    http: httpx.Client, service: ScriptedService
) -> None:
    told = {"message": "Too long.", "type": "invalid_request_error", "code": "too_long", "param": "messages"}
    service.script = Script(refusal=RequestError("Too long.", code="too_long", param="messages"))
    for stream in (True, False):
        assert fault(post(http, stream=stream)) == told


def test_a_full_server_says_when_to_come_back(http: httpx.Client, service: ScriptedService) -> None:
    for status in (429, 503):
        service.script = Script(refusal=RequestError("Full.", status=status, type="server_error", code="busy"))
        response = post(http)
        fault(response, status)
        assert 0 < int(response.headers["retry-after"]) <= 120


def test_when_one_choice_is_refused_none_runs(http: httpx.Client, service: ScriptedService) -> None:
    service.refuse_after = 2
    fault(post(http, n=4), 429)
    assert service.script.closed.wait()
    assert len(service.requests) == 2


def test_a_failure_before_the_first_token_is_a_plain_answer(http: httpx.Client, service: ScriptedService) -> None:
    cases: list[tuple[Exception, int]] = [
        (LinkClosed("The device has gone."), 503),
        (EngineError("Out of memory."), 500),
        (PacelineError("It cannot go on."), 500),
        (ZeroDivisionError("secret"), 500),
    ]
    for error, status in cases:
        service.script = Script([error])
        for stream in (True, False):
            told = fault(post(http, stream=stream), status)
            assert (told["message"] == str(error)) is isinstance(error, PacelineError)
            assert "secret" not in str(told)


@pytest.mark.parametrize("error", [LinkClosed("The device has gone."), ZeroDivisionError("secret")])
def test_a_failure_after_the_first_token_is_an_event_in_the_stream(
    http: httpx.Client, service: ScriptedService, error: Exception
) -> None:
    service.script = Script([TextDelta("a", 1), error])
    response = post(http, stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200
    *chunks, failure, last = events(response.text)
    assert last == "[DONE]"
    assert set(json.loads(failure)["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in failure
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_answer_that_was_not_finished_is_no_success(
    http: httpx.Client, service: ScriptedService, reason: str
) -> None:
    service.script = Script([TextDelta("a", 1), done(reason)])
    fault(post(http), 500)
    *_, failure, last = events(post(http, stream=True).text)
    assert "error" in json.loads(failure) and last == "[DONE]"


def test_a_choice_that_fails_ends_the_others(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([EngineError("Out of memory.")])
    fault(post(http, n=3), 500)
    assert service.script.ended.wait()


def send_and_leave(url: str, body: dict[str, object], until: Signal) -> None:
    """Send a request, wait for `until`, and leave without reading."""
    parts = urlsplit(url)
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as client:
        client.sendall(head.encode() + payload)
        assert until.wait()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", [[], [TextDelta("a", 1)]], ids=["before the first token", "after it"])
def test_a_client_that_leaves_ends_the_generation(
    url: str, service: ScriptedService, stream: bool, before: list[TextDelta]
) -> None:
    script = service.script = Script([*before, Signal(), done()])  # nobody ever sets the signal
    send_and_leave(url, BODY | {"stream": stream}, script.began)
    assert script.ended.wait()


def test_a_client_that_leaves_while_its_request_waits_is_not_admitted(url: str, service: ScriptedService) -> None:
    script = service.script = Script(answering("a"), hold=Signal())
    send_and_leave(url, BODY, script.began)
    assert script.cancelled.wait()
    assert not service.requests


def test_a_client_that_leaves_ends_all_choices(url: str, service: ScriptedService) -> None:
    script = service.script = Script([Signal()])
    send_and_leave(url, BODY | {"n": 4}, script.began)
    assert script.ended.wait()


def test_a_client_that_stops_reading_a_stream_and_leaves_is_noticed(url: str, service: ScriptedService) -> None:
    script = service.script = Script([TextDelta("x" * 4096, 1), Signal()])
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY | {"stream": True}) as response:
        for line in response.iter_lines():
            if "xxxx" in line:
                break
    assert script.ended.wait()
