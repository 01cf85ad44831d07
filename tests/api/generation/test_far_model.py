"""What a client of each API is told by a server whose model's servers refuse, are busy or are gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.engine.base import ServedModel
from paceline.engine.fake import ByteTokenizer
from paceline.engine.remote.opening import open_remote
from paceline.runtime.node import Node
from tests.api.scripted import running
from tests.runtime.remote.standin import Server, StandIn, installed

MESSAGES = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, object] = {"temperature": 0}  # a sampled text may end before the server is lost
ASKED: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": MESSAGES, **GREEDY},
    "/v1/completions": {"prompt": "Hi", **GREEDY},
    "/v1/responses": {"input": "Hi", **GREEDY},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20, **GREEDY},
    "/api/chat": {"messages": MESSAGES, "options": GREEDY},
}
TOO_LONG = "This model's maximum context length is 9 tokens."
OPENAI = {400: "context_length_exceeded", 429: "rate_limit_exceeded", 503: "model_unavailable"}
RESPONSES = {400: "invalid_prompt", 429: "rate_limit_exceeded", 503: "server_error"}
ANTHROPIC = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[Server, httpx.Client]]:
    stand_in, words = StandIn(), ByteTokenizer()
    with installed(stand_in, "one") as urls:
        node = Node("cloud", ServedModel(open_remote(urls, Path(), words, name="fake"), words), None)
        with (
            running(create_app(node, keyring=Keyring({})), node) as url,
            httpx.Client(base_url=url, transport=httpx.HTTPTransport()) as client,
        ):
            yield stand_in.servers["one"], client


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_far_server_s_status_is_the_client_s(far: tuple[Server, httpx.Client], path: str, stream: bool) -> None:
    server, client = far
    for far_status, after, status in ((400, None, 400), (429, "7", 429), (503, "7", 503), (None, "1", 503)):
        server.status, server.said, server.retry_after = far_status, TOO_LONG, after
        server.down = far_status is None
        answer = client.post(path, json={"model": "fake", "stream": stream, **ASKED[path]})
        if path == "/v1/responses" and stream:  # has begun already
            response = json.loads(answer.text.rsplit("data: ", 1)[1])["response"]
            assert response["error"]["code"] == RESPONSES[status]
            continue
        assert (answer.status_code, answer.headers.get("Retry-After")) == (status, after)
        error = answer.json()["error"]
        if path == "/v1/messages":
            assert error["type"] == ANTHROPIC[status]
        elif path.startswith("/v1"):
            assert error["code"] == OPENAI[status]
    server.status, server.down = None, False


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_has_begun_ends_with_the_error(far: tuple[Server, httpx.Client], path: str) -> None:
    server, client = far
    server.cut_after, server.dies = 3, True
    answer = client.post(path, json={"model": "fake", "stream": True, **ASKED[path]})
    server.cut_after, server.down = None, False
    assert answer.status_code == 200
    assert "none of the model's servers answers" in answer.text
