"""Failures before, during and around an answer, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, closing
from types import SimpleNamespace

import httpx
import pytest
from starlette.types import Message

from paceline.api.http import admission as admission_module
from paceline.api.http import server as http_server
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.auth import Identity, Keyring
from paceline.api.http.body import PIECE, Whole
from paceline.errors import EngineError, LinkClosed, PacelineError, RequestError
from paceline.runtime.service import TextDelta
from tests.api.chat.test_output import events
from tests.api.conftest import BODY
from tests.api.generation.test_request import fault, post
from tests.api.scripted import WAIT, Script, ScriptedService, Signal, answering, connected, done, heard, serving


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
        (TimeoutError("secret"), 500),  # no silence, for which a stream would wait
    ]
    for error, status in cases:
        service.script = Script([error])
        for stream in (True, False):
            told = fault(post(http, stream=stream), status)
            assert (told["message"] == str(error)) is isinstance(error, PacelineError)
            assert "secret" not in str(told)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_failure_after_the_first_token_is_the_last_event_of_the_stream(
    http: httpx.Client, service: ScriptedService, path: str
) -> None:
    for error in (LinkClosed("The device has gone."), ZeroDivisionError("secret")):
        service.script = Script([TextDelta("a", 1), error])
        response = http.post(path, json=BODY | {"stream": True, "max_tokens": 9})
        assert response.status_code == 200 and "secret" not in response.text
        if path == "/v1/chat/completions":
            *chunks, failure, last = events(response.text)
            assert last == "[DONE]" and set(json.loads(failure)["error"]) == {"message", "type", "param", "code"}
            assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
        elif path == "/v1/messages":
            last = json.loads(response.text.rpartition("data: ")[2])
            assert last["type"] == "error" and last["error"]["type"] in ("overloaded_error", "api_error")
        else:
            assert set(json.loads(response.text.splitlines()[-1])) == {"error"}


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_answer_that_was_not_finished_is_no_success(
    http: httpx.Client, service: ScriptedService, reason: str
) -> None:
    service.script = Script([TextDelta("a", 1), done(reason)])
    fault(post(http), 500)
    *_, failure, last = events(post(http, stream=True).text)
    assert "error" in json.loads(failure) and last == "[DONE]"


def test_answers_that_outlive_a_drain_end_as_their_protocols_have_it(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "DRAIN_S", 0.0)
    asked = BODY | {"max_tokens": 9, "input": "Hi", "store": False}
    paths = ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses", "/v1/chat/completions"]
    with ExitStack() as open_:
        told = []
        with serving(service) as url:
            for index, path in enumerate(paths):
                service.script = Script([TextDelta("a", 1), Signal()])
                body = json.dumps(asked | {"stream": index < 4})
                connection = open_.enter_context(closing(connected(url)))
                head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
                assert service.script.began.wait()
                told.append((connection, connection.recv(65_536) if index < 4 else b""))
        chat, messages, ollama, responses, whole = (first + heard(connection) for connection, first in told)
    assert b"shutting_down" in chat and chat.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"event: error" in messages and b"overloaded_error" in messages
    assert b'{"error":"The server was stopped' in ollama
    assert b"event: response.failed" in responses
    assert whole.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in whole


def test_a_choice_that_fails_ends_the_others(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([EngineError("Out of memory.")])
    fault(post(http, n=3), 500)
    assert service.script.ended.wait()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_must_be_refused_is_refused_before_its_body_comes(
    url: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def full(_: str) -> None:
        raise RequestError("Full.", status=429, type="rate_limit_error", code="rate_limit_exceeded")

    monkeypatch.setattr(service, "wait_for_room", full)
    with connected(url) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n".encode())
        answer = b""
        while b"rate_limit_exceeded" not in answer and (part := client.recv(65_536)):
            answer += part
    assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after:" in answer.lower()
    assert b"rate_limit_exceeded" in answer
    assert not service.requests


def send_and_leave(url: str, body: dict[str, object], until: Signal) -> None:
    """Send a request, wait for `until`, and leave without reading."""
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
    with connected(url) as client:
        client.sendall(head.encode() + payload)
        assert until.wait()


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"n": 4}])
@pytest.mark.parametrize("before", [[], [TextDelta("a", 1)]], ids=["before the first token", "after it"])
def test_a_client_that_leaves_ends_the_generation(
    url: str, service: ScriptedService, fields: dict[str, object], before: list[TextDelta]
) -> None:
    script = service.script = Script([*before, Signal(), done()])  # nobody ever sets the signal
    send_and_leave(url, BODY | fields, script.began)
    assert script.ended.wait()


def test_a_client_that_leaves_while_its_request_waits_is_not_admitted(url: str, service: ScriptedService) -> None:
    script = service.script = Script(answering("a"), hold=Signal())
    send_and_leave(url, BODY, script.began)
    assert script.cancelled.wait()
    assert not service.requests


@pytest.mark.anyio
async def test_a_key_has_a_share_of_what_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the memory of all large answers; other keys and small answers are spared."""
    monkeypatch.setattr(admission_module, "MAX_UNREAD", 16 * PIECE)
    monkeypatch.setattr(admission_module, "MAX_UNREAD_PER_KEY", 4 * PIECE)
    admission, reads = AdmissionControl(Keyring({"ann": None, "bert": None})), asyncio.Event()
    app, body = SimpleNamespace(state=SimpleNamespace(admission=admission)), bytes(range(256)) * (2 * PIECE // 256)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def asked(key: str, content: bytes, *, slow: bool = False) -> bytes:
        sent: list[bytes] = []

        async def send(message: Message) -> None:
            if slow and sent:
                await reads.wait()
            sent.append(message.get("body", b""))

        scope = {"type": "http", "app": app, "state": {"identity": Identity(key=key)}}
        async with asyncio.timeout(WAIT):
            await Whole(content)(scope, receive, send)
        return b"".join(sent)

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(asked("ann", body, slow=True)) for _ in range(2)]
        while admission.unread.taken < 4 * PIECE:
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="are not read yet"):
            await asked("ann", body)
        assert (await asked("ann", b"{}"), await asked("bert", body)) == (b"{}", body)
        reads.set()
    assert [task.result() for task in waiting] == [body, body] and admission.unread.taken == 0
