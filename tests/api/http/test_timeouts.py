"""Time limits on a request's head and on the reading of its answer: slow and silent connections are closed, slow
answers are not."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from starlette.websockets import WebSocket
from websockets.sync.client import connect

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.api.http.server import HttpConnection
from tests.api.scripted import WAIT, Script, ScriptedService, Signal, answering, connected, running

ONE = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, service: ScriptedService) -> Iterator[str]:
    """The URL of a server with a short limit."""
    monkeypatch.setattr(HttpConnection, "head_s", 0.5)
    app = create_app(service, keyring=Keyring({}))

    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_bytes(await websocket.receive_bytes())

    app.add_api_websocket_route("/echo", echo)
    with running(app) as url:
        yield url


def is_closed(client: socket.socket, wait: float) -> bool:
    """True if the server closes the connection within `wait` seconds."""
    readable, _, _ = select.select([client], [], [], wait)
    try:
        return bool(readable) and client.recv(65_536) == b""
    except ConnectionError:
        return True


def dribble(client: socket.socket, byte: bytes = b"x") -> bool:
    """Send single bytes until the server closes the connection. False after WAIT seconds."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        try:
            client.sendall(byte)
        except ConnectionError:
            return True
        if is_closed(client, 0.02):
            return True
    return False


def answered(client: socket.socket) -> bytes:
    client.sendall(ONE)
    answer = b""
    while b"\r\n\r\n{" not in answer:
        answer += client.recv(65_536)
    return answer


def test_a_head_that_comes_byte_by_byte_is_cut_off_be_it_the_first_or_a_later_one(url: str) -> None:
    for before in (0, 3):
        with connected(url) as client:
            for _ in range(before):
                assert answered(client).startswith(b"HTTP/1.1 200 ")
            client.sendall(b"GET /")
            assert dribble(client)


def test_a_slow_answer_is_not_cut_off(url: str, service: ScriptedService) -> None:
    go_on = Signal()
    service.script = Script([go_on, *answering("at last")])
    body = b'{"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}'
    with connected(url) as client, connected(url) as silent:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        client.sendall(body)
        assert service.script.began.wait()
        assert is_closed(silent, WAIT), "the limit has passed"
        with connected(url) as later:
            assert is_closed(later, WAIT)
        go_on.set()
        answer = b""
        while part := client.recv(65_536):
            answer += part
            if b"at last" in answer:
                break
        assert b"at last" in answer


def test_a_websocket_has_no_limit_on_the_head(url: str) -> None:
    with connect(f"{url.replace('http', 'ws')}/echo", proxy=None, ping_interval=None) as websocket:
        with connected(url) as silent:
            assert is_closed(silent, WAIT)
        websocket.send(b"still here")
        assert websocket.recv(WAIT) == b"still here"


# ---- answers that are not read --------------------------------------------------------------------------------------
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole answer"])
def test_a_client_that_reads_no_more_is_cut_off_whatever_it_has_asked_for(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(HttpConnection, "read_s", 0.2)
    lost, connection_lost = Signal(), HttpConnection.connection_lost

    def lose(connection: HttpConnection, error: Exception | None) -> None:
        connection_lost(connection, error)
        lost.set()

    monkeypatch.setattr(HttpConnection, "connection_lost", lose)
    service.script = Script(answering(*["x" * 1_000_000] * 20))  # more than the system buffers
    body = b'{"model": "scripted", "stream": %b, "messages": [{"role": "user", "content": "Hi"}]}'
    body %= b"true" if streamed else b"false"
    with running(create_app(service, keyring=Keyring({}))) as url, connected(url) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert lost.wait() and service.script.ended.wait()


@pytest.mark.parametrize(
    ("left", "is_cut"), [([300_000, 200_000, 130_000], False), ([300_000, 200_000, 140_000], True)]
)
def test_a_client_that_reads_slowly_is_cut_off_where_it_is_slower_than_it_may_be(left: list[int], is_cut: bool) -> None:
    """64 KiB at each look; the look is a call of the loop's clock."""
    aborted, looks = list[bool](), list[Callable[[], None]]()

    def call_later(_: float, look: Callable[[float], None], before: float) -> SimpleNamespace:
        looks.append(partial(look, before))
        return SimpleNamespace(cancel=looks.clear)

    sizes = iter(left)
    connection = object.__new__(HttpConnection)
    connection.flow = SimpleNamespace(pause_writing=bool, resume_writing=bool)  # type: ignore[assignment]
    connection.loop = SimpleNamespace(call_later=call_later)  # type: ignore[assignment]
    connection.transport = SimpleNamespace(  # type: ignore[assignment]
        get_write_buffer_size=lambda: next(sizes), abort=lambda: aborted.append(True)
    )
    connection.pause_writing()
    for _ in left[1:]:
        looks.pop()()
    assert bool(aborted) == is_cut
    if not is_cut:
        connection.resume_writing()
        assert not looks, "it is read"
