"""Streams of a model that has to be loaded first: they are not silent meanwhile, and refused at their end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import httpx
import pytest
from openai import APIError, OpenAI

from paceline.api.generation import streaming
from paceline.errors import RequestError
from tests.api.scripted import MODEL, WAIT, Script, ScriptedService, Signal, answering, serving

ASKED = [{"role": "user", "content": "Where?"}]
LATE = "org/second"  # is not loaded
# path, body, what a stream says while it waits
STREAMS: Mapping[str, tuple[dict[str, object], str]] = {
    "/v1/chat/completions": ({"messages": ASKED, "n": 2}, ": ping"),
    "/v1/completions": ({"prompt": [[1, 2, 3], [4]], "n": 2, "max_tokens": 4}, ": ping"),
    "/v1/responses": ({"input": "Where?"}, ": ping"),
    "/v1/messages": ({"messages": ASKED, "max_tokens": 4}, "event: ping"),
    "/api/chat": ({"messages": ASKED}, '"content":""'),
    "/api/generate": ({"prompt": "Where?"}, '"response":""'),
}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> ScriptedService:
    monkeypatch.setattr(streaming, "HEADERS_WAIT_S", 0.0)
    return ScriptedService()


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    with serving(service, keep_alive=0.02) as url:
        yield url


def lines_of(url: str, path: str, seen: Signal) -> list[str]:
    """All lines of a stream. seen: set at the first one that only says that it waits."""
    fields, said = STREAMS[path]
    body = fields | {"model": LATE, "stream": True}
    lines = []
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=WAIT, verify=False) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            lines.append(line)
            if said in line:
                seen.set()
    return lines


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_says_that_it_waits_while_its_model_is_loaded(path: str, url: str, service: ScriptedService) -> None:
    loaded = Signal()
    service.script = Script(answering("Here", "."), hold=loaded)
    lines = lines_of(url, path, loaded)  # or it would never end
    assert "Here" in "".join(lines)
    assert service.script.ended.wait()


@pytest.mark.parametrize("path", STREAMS)
def test_what_refuses_it_then_ends_the_stream_with_a_sentence(path: str, url: str, service: ScriptedService) -> None:
    loaded = Signal()
    refusal = RequestError(
        "The model org/second cannot be loaded now: no memory.", status=503, code="model_unavailable"
    )
    service.script = Script(hold=loaded, refusal=refusal)
    assert "cannot be loaded now" in "".join(lines_of(url, path, loaded))


def test_a_client_that_leaves_meanwhile_is_not_prepared_for(url: str, service: ScriptedService) -> None:
    service.script = Script(answering("Here"), hold=Signal())
    body = STREAMS["/v1/chat/completions"][0] | {"model": LATE, "stream": True, "n": 1}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=WAIT, verify=False) as response:
        next(response.iter_lines())
    assert service.script.cancelled.wait()


def test_openais_client_reads_such_a_stream_and_its_refusal(url: str, service: ScriptedService) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
        service.script = Script(answering("Here", "."))
        stream = client.chat.completions.create(model=LATE, messages=ASKED, stream=True)  # type: ignore[call-overload]  # shorthand
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "Here."
        service.script = Script(
            refusal=RequestError("No memory.", status=503, code="model_unavailable"), hold=(held := Signal())
        )
        stream = client.chat.completions.create(model=LATE, messages=ASKED, stream=True)  # type: ignore[call-overload]  # likewise
        held.set()
        with pytest.raises(APIError, match="No memory"):
            list(stream)


def test_usage_of_completions_counts_each_prompt_once(url: str, service: ScriptedService) -> None:
    for model in (LATE, MODEL.name):
        service.script = Script(answering("Here"))
        body = {
            "model": model,
            "prompt": [[1, 2], [3]],
            "n": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        lines = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT, verify=False).text.split("\n\n")
        assert json.loads(lines[-3].removeprefix("data: "))["usage"]["prompt_tokens"] == 2 * 7
