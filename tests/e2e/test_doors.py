"""A greedy key, and more connections than there are descriptors, against a real server. Others are served meanwhile.

Strangers that say half of something: R16. A key that takes all places of answers: R23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import configured
from tests.reliability.real_server import BODY, SMALL, client, many_files, real_server, strangers


@contextmanager
def server(directory: Path, *flags: str, files: int | None = None) -> Iterator[str]:
    """URL of a small server with the keys `ann` and `bert`, whose log is in `directory`."""
    with real_server(directory, *flags, files=files, program=SMALL) as found:
        yield found.url


@pytest.fixture(autouse=True)
def enough_files() -> Iterator[None]:
    with many_files():
        yield


def until(held: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if held():
            return
    raise AssertionError("it never held")


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
