"""Answers that are long in coming: spaces keep those in one piece open, and what fails then is no answer; streams say
that they wait."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from paceline.api.generation import streaming
from paceline.errors import PacelineError, RequestError
from tests.api.scripted import MODEL, WAIT, Script, ScriptedService, Signal, answering, serving

ASKED = [{"role": "user", "content": "Where?"}]
LATE = "org/second"  # is not loaded
BODIES: Mapping[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": ASKED, "n": 2},
    "/v1/completions": {"prompt": [[1, 2, 3], [4]], "n": 2, "max_tokens": 4},
    "/v1/responses": {"input": "Where?", "truncation": "auto"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 4},
    "/api/chat": {"messages": ASKED},
    "/api/generate": {"prompt": "Where?"},
}
NO_MEMORY = RequestError("The model cannot be loaded now: no memory.", status=503, code="model_unavailable")


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    with serving(service, keep_alive=0.02) as url:
        yield url


def posted(url: str, path: str, open_now: Signal, model: str = LATE) -> tuple[httpx.Response, bytes, bool]:
    """The answer in one piece: its head, its body, and whether the body came whole. open_now: set by its first byte."""
    body, whole = b"", True
    fields = BODIES[path] | {"model": model, "stream": False}
    with httpx.stream("POST", f"{url}{path}", json=fields, timeout=WAIT, verify=False) as response:
        try:
            for part in response.iter_raw():
                body += part
                open_now.set()
        except httpx.RemoteProtocolError:
            whole = False
    return response, body, whole


@pytest.mark.parametrize("path", BODIES)
def test_spaces_come_while_its_model_is_loaded_and_then_the_answer(
    path: str, url: str, service: ScriptedService
) -> None:
    loaded = Signal()
    service.script = Script(answering("Here", "."), hold=loaded)
    response, body, whole = posted(url, path, loaded)  # or it would never end
    assert response.status_code == 200 and response.headers["content-type"] == "application/json" and whole
    assert body.startswith(b" ") and b"\n" not in body, "clients of Ollama's read lines"
    assert "Here." in json.dumps(json.loads(body))


def test_a_loaded_model_that_writes_for_long_is_no_different(url: str, service: ScriptedService) -> None:
    more = Signal()
    service.script = Script([*answering("Here")[:1], more, *answering(".")])
    _, body, whole = posted(url, "/api/chat", more, MODEL.name)
    assert body.startswith(b" ") and json.loads(body)["message"]["content"] == "Here." and whole


@pytest.mark.parametrize("path", BODIES)
def test_what_fails_then_is_said_and_never_ends_as_an_answer_does(
    path: str, url: str, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = Signal()
    service.script = Script(hold=loaded, refusal=NO_MEMORY)
    response, body, whole = posted(url, path, loaded)
    assert response.status_code == 200 and not whole
    assert "no memory" in json.dumps(json.loads(body)["error"])
    assert "broken off" in caplog.text and "no memory" in caplog.text and "Traceback" not in caplog.text


SOON = "0.1"  # s


def cut(url: str, service: ScriptedService, **headers: str) -> dict[str, Any]:
    """The error of an answer that would never end, and was open for a while."""
    service.script = Script([*answering("Here")[:1], Signal()])
    fields = BODIES["/v1/chat/completions"] | {"model": MODEL.name}
    body = b""
    path = f"{url}/v1/chat/completions"
    asking = httpx.stream("POST", path, json=fields, headers=headers, timeout=WAIT, verify=False)
    with asking as response, pytest.raises(httpx.RemoteProtocolError):
        for part in response.iter_raw():
            body += part
    assert response.status_code == 200 and body.startswith(b" ")
    assert service.script.ended.wait(), "nothing is written for nobody"
    error: dict[str, Any] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize("header", ["x-stainless-read-timeout", "x-stainless-timeout"])
def test_a_client_is_held_no_longer_than_it_says_that_it_waits(url: str, service: ScriptedService, header: str) -> None:
    error = cut(url, service, **{header: SOON})
    assert error["code"] == "answer_too_late" and header in error["message"]


def test_nor_longer_than_the_setting_says_whatever_it_says_itself(service: ScriptedService) -> None:
    with serving(service, keep_alive=0.02, longest_silent=float(SOON)) as url:
        for said in ("60", "-1", "0", "nan", "inf", "never", ""):
            error = cut(url, service, **{"x-stainless-read-timeout": said})
            assert error["code"] == "answer_too_late" and "longest_silent_answer" in error["message"]


def test_where_no_space_has_been_sent_it_is_a_status(service: ScriptedService) -> None:
    with serving(service) as url:
        service.script = Script([Signal()])
        fields = BODIES["/v1/messages"] | {"model": MODEL.name}
        response = httpx.post(f"{url}/v1/messages", json=fields, headers={"x-stainless-timeout": SOON}, verify=False)
    assert response.status_code == 408 and response.json()["error"]["type"] == "timeout_error"
    assert response.headers["x-should-retry"] == "false"


def test_a_stream_goes_on_for_as_long_as_it_takes(url: str, service: ScriptedService) -> None:
    more = Signal()
    service.script = Script([*answering("Here")[:1], more, *answering(".")])
    fields = BODIES["/v1/chat/completions"] | {"model": MODEL.name, "stream": True, "n": 1}
    headers = {"x-stainless-read-timeout": SOON}
    text = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=fields, headers=headers, verify=False) as response:
        for part in response.iter_text():
            text += part
            if text.count(": ping") > 10:  # of 0.02 s each
                more.set()
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("path", "more"), [("/v1/responses", {}), ("/v1/chat/completions", {"stream": True})])
def test_a_client_that_leaves_meanwhile_is_not_prepared_for(
    url: str, service: ScriptedService, path: str, more: dict[str, object]
) -> None:
    service.script = Script(answering("Here"), hold=Signal())
    fields = BODIES[path] | {"model": LATE, "n": 1} | more
    with httpx.stream("POST", f"{url}{path}", json=fields, timeout=WAIT, verify=False) as response:
        next(response.iter_raw())
    assert service.script.cancelled.wait()


# ---- streams, which are refused at their end ------------------------------------------------------------------------
SIGNS = {"/v1/messages": "event: ping", "/api/chat": '"content":""', "/api/generate": '"response":""'}  # else ": ping"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are sent before the model is loaded."""
    monkeypatch.setattr(streaming, "HEADERS_WAIT_S", 0.0)


def lines_of(url: str, path: str, seen: Signal) -> list[str]:
    """All lines of a stream. seen: set at the first one that only says that it waits."""
    body = BODIES[path] | {"model": LATE, "stream": True}
    lines = []
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=WAIT, verify=False) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            lines.append(line)
            if SIGNS.get(path, ": ping") in line:
                seen.set()
    return lines


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_that_it_waits_while_its_model_is_loaded_and_ends_with_an_answer_or_a_sentence(
    path: str, url: str, service: ScriptedService
) -> None:
    service.script = Script(answering("Here", "."), hold=(loaded := Signal()))
    assert "Here" in "".join(lines_of(url, path, loaded))  # or it would never end
    assert service.script.ended.wait()
    service.script = Script(hold=(loaded := Signal()), refusal=NO_MEMORY)
    assert "cannot be loaded now" in "".join(lines_of(url, path, loaded))


@pytest.mark.usefixtures("at_once")
def test_openais_client_reads_such_a_stream_and_its_refusal(url: str, service: ScriptedService) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
        service.script = Script(answering("Here", "."))
        stream = client.chat.completions.create(model=LATE, messages=ASKED, stream=True)  # type: ignore[call-overload]  # shorthand
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "Here."
        service.script = Script(refusal=NO_MEMORY, hold=(held := Signal()))
        stream = client.chat.completions.create(model=LATE, messages=ASKED, stream=True)  # type: ignore[call-overload]  # likewise
        held.set()
        with pytest.raises(APIError, match="no memory"):
            list(stream)


@pytest.mark.parametrize("error", [PacelineError("The engine is gone."), ValueError("a secret")])
def test_a_failure_in_the_middle_reveals_what_its_status_would(
    error: Exception, url: str, service: ScriptedService
) -> None:
    more = Signal()
    service.script = Script([*answering("Here")[:1], more, error])
    _, body, whole = posted(url, "/v1/chat/completions", more, MODEL.name)
    assert not whole and b"secret" not in body
    assert json.loads(body)["error"]["type"] == "server_error"
