"""Strangers and greedy keys against a real server: others are served meanwhile, and every stranger is closed."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.wire.messages import SUBPROTOCOL
from tests.server.test_programs import ROOT, STARTER

WAIT = 120.0  # s, far beyond every limit of the server
HALF_BODIES = 1400  # more than requests are admitted in all
BODY = {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
HALF_BODY = b"POST /v1/devices/enrol HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
UPGRADE = (
    "GET /v1/link HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    f"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: {SUBPROTOCOL}\r\n\r\n"
).encode()

# The server, with room for 27 answers instead of 1,152 and for 18 background responses; both keep a ninth.
SMALL = f"""
from paceline.api.responses import runs
from paceline.runtime import node

node.MAX_ANSWERS, runs.MAX_BACKGROUND = 27, 18
{STARTER}
"""


@contextmanager
def server(directory: Path, *flags: str, files: int | None = None) -> Iterator[str]:
    """URL of a server with the keys `ann` and `bert`, whose log is in `directory`. files: limit of open ones."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    settings = ["--model", "fake", "--threads", "1", "--port", "0", "--state-dir", str(directory / "state")]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SMALL, "serve", *settings, "--api-keys", "ann,bert", *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=limit,
        )
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if "serving" in line), "")
        assert ready, (directory / "log").read_text()
        yield ready.split(" on ")[1].split(" ")[0]
    finally:
        process.terminate()
        process.communicate(timeout=WAIT)


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=WAIT, trust_env=False, headers={"Authorization": f"Bearer {key}"})


def strangers(url: str, stack: ExitStack, number: int, says: bytes) -> list[socket.socket]:
    """Connections that say this and nothing more."""
    address = httpx.URL(url)
    found = []
    for _ in range(number):
        each = stack.enter_context(socket.create_connection((address.host, address.port), WAIT))
        each.setblocking(False)
        found.append(each)
        try:
            each.send(says or b"")
        except ConnectionError:
            continue  # it has been closed already
    return found


def ends(waiting: list[socket.socket]) -> Iterator[socket.socket]:
    """Connections as the server closes them, in this order; none is ever answered or closed from this side."""
    poll = select.poll()
    open_ones = {each.fileno(): each for each in waiting}
    for number in open_ones:
        poll.register(number, select.POLLIN)
    while open_ones:
        found = poll.poll(WAIT * 1000)
        assert found, f"{len(open_ones)} connections are open still"
        for number, _ in found:
            try:
                ended = open_ones[number].recv(65_536) == b""
            except ConnectionError:
                ended = True
            except BlockingIOError:
                continue
            if ended:
                poll.unregister(number)
                yield open_ones.pop(number)


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_half_bodies_of_strangers_take_no_keys_place(tmp_path: Path) -> None:
    with server(tmp_path) as url, ExitStack() as stack, client(url, "ann") as ann:
        waiting = strangers(url, stack, HALF_BODIES, HALF_BODY)
        for _ in range(5):
            assert ann.post("/v1/chat/completions", json=BODY).status_code == 200
        assert len(list(ends(waiting))) == HALF_BODIES


def test_silent_sockets_are_closed_even_if_they_never_answer_a_close(tmp_path: Path) -> None:
    slow = BODY | {"max_tokens": 30, "logit_bias": {"256": -100}}  # 1.5 s at least
    with server(tmp_path, "--emulate", "forward=50ms") as url, ExitStack() as stack, client(url, "ann") as ann:
        sockets = strangers(url, stack, 40, UPGRADE)
        for each in sockets:
            each.setblocking(True)
            assert each.recv(65_536).startswith(b"HTTP/1.1 101 ")
            each.setblocking(False)
        assert ann.post("/v1/chat/completions", json=slow).json()["usage"]["completion_tokens"] == 30
        later = strangers(url, stack, 1, b"")
        order = list(ends([*sockets, *later]))
        assert not set(order[:20]) & set(later), "a WebSocket's time is over as soon as a silent connection's"
        many = [
            *strangers(url, stack, 150, b""),
            *strangers(url, stack, 75, b"GET /"),
            *strangers(url, stack, 75, UPGRADE),
        ]
        assert ann.post("/v1/chat/completions", json=BODY).status_code == 200
        assert len(list(ends(many))) == 300


def until(held: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if held():
            return
    raise AssertionError("it never held")


def test_another_key_gets_in_beside_one_with_all_the_answers_it_can_have(tmp_path: Path) -> None:
    endless = BODY | {"max_tokens": 100_000, "stream": True, "logit_bias": {"256": -100}}
    with (
        server(tmp_path, "--emulate", "forward=10ms") as url,
        ExitStack() as stack,
        client(url, "ann") as ann,
        client(url, "bert") as bert,
    ):
        answers = [stack.enter_context(ann.stream("POST", "/v1/chat/completions", json=endless)) for _ in range(27)]
        assert [answer.status_code for answer in answers] == [200] * 24 + [429] * 3
        assert answers[-1].headers["retry-after"] == "1"
        refusal = answers[-1].read().decode()
        assert "rate_limit_exceeded" in refusal and "24 of them for this key" in refusal
        for _ in range(3):
            assert bert.post("/v1/chat/completions", json=BODY).status_code == 200
        assert ann.post("/v1/chat/completions", json=BODY).status_code == 429


def test_another_key_gets_its_background_responses(tmp_path: Path) -> None:
    endless = {"model": "fake", "input": "Hi", "max_output_tokens": 100_000, "background": True}
    with (
        server(tmp_path, "--emulate", "forward=100ms", "--max-tokens-default", "500") as url,
        client(url, "ann") as ann,
        client(url, "bert") as bert,
    ):
        made = [ann.post("/v1/responses", json=endless | {"temperature": 2.0, "seed": n}) for n in range(18)]
        refused = [answer for answer in made if answer.status_code == 429]
        assert len(refused) >= 2 and refused[0].json()["error"]["code"] == "too_many_background_responses"
        first = bert.post("/v1/responses", json=endless)
        assert first.status_code == 200
        running = next(answer for answer in made if answer.status_code == 200).json()["id"]
        assert ann.post(f"/v1/responses/{running}/cancel").status_code == 200
        assert ann.get("/readyz").json()["ready"]


def test_a_server_with_few_descriptors_logs_little_and_answers_again(tmp_path: Path) -> None:
    with server(tmp_path, files=128) as url, client(url, "ann") as ann:
        with ExitStack() as stack:
            strangers(url, stack, 400, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        until(lambda: answers(ann))
        assert len((tmp_path / "log").read_text().splitlines()) < 250, "some at the start, and one for each request"


def answers(http: httpx.Client) -> bool:
    try:
        return http.post("/v1/chat/completions", json=BODY).status_code == 200
    except httpx.TransportError:
        return False
