"""Strangers and greedy keys against a real server: others are served meanwhile, and every stranger is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import configured
from tests.reliability.real_server import BODY, NO_END, SMALL, UPGRADE, client, ends, many_files, real_server, strangers

HALF_BODIES = 1400  # more than requests are admitted in all
HALF_BODY = b"POST /v1/devices/enrol HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"


@contextmanager
def server(directory: Path, *flags: str, files: int | None = None) -> Iterator[str]:
    """URL of a small server with the keys `ann` and `bert`, whose log is in `directory`."""
    with real_server(directory, *flags, files=files, program=SMALL) as found:
        yield found.url


@pytest.fixture(autouse=True)
def enough_files() -> Iterator[None]:
    with many_files():
        yield


def test_half_bodies_of_strangers_take_no_keys_place(tmp_path: Path) -> None:
    with server(tmp_path) as url, ExitStack() as stack, client(url, "ann") as ann:
        waiting = strangers(url, stack, HALF_BODIES, HALF_BODY)
        for _ in range(5):
            assert ann.post("/v1/chat/completions", json=BODY).status_code == 200
        assert len(list(ends(waiting))) == HALF_BODIES


def test_silent_sockets_are_closed_even_if_they_never_answer_a_close(tmp_path: Path) -> None:
    slow = BODY | NO_END | {"max_tokens": 30}  # 1.5 s at least
    with (
        server(tmp_path, *configured(tmp_path, "tuning.emulate = 'forward=50ms'")) as url,
        ExitStack() as stack,
        client(url, "ann") as ann,
    ):
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
    endless = BODY | NO_END | {"max_tokens": 100_000, "stream": True}
    with (
        server(tmp_path, *configured(tmp_path, "tuning.emulate = 'forward=10ms'")) as url,
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
        server(
            tmp_path, *configured(tmp_path, "tuning.emulate = 'forward=100ms'", "answers.max_tokens_default = 500")
        ) as url,
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
