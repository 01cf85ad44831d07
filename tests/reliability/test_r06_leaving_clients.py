"""R6: clients that leave. Their answers end, and give back what they held; background responses go on: R17."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import configured
from tests.api.responses.test_resume import server
from tests.reliability.conftest import Figure, Size
from tests.reliability.streams import WAIT_S, until

BODY = {"model": "fake", "max_tokens": 500, "logit_bias": {"256": -100}, "stream": True}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, httpx.Client]]:
    directory = tmp_path_factory.mktemp("leaving")
    pace = configured(directory, "tuning.emulate = 'forward=20ms'")
    with server(directory, *pace, "--kv-mib", "512") as (process, http):
        yield process.pid, http


def answers(http: httpx.Client) -> int:
    return int(http.get("/readyz").json()["answers"])


def free_rows(http: httpx.Client) -> int:
    """Rows of KV memory that no answer uses."""
    lines = http.get("/metrics").text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("paceline_kv_free_rows"))))


def descriptors(process: int) -> int:
    """Without those of the devices' store, which the watch over links opens at its first look and keeps open."""
    found = 0
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += not each.readlink().name.startswith("devices.sqlite")
    return found


def test_answers_of_clients_that_leave_end_and_give_back_their_memory_and_descriptors(
    site: tuple[int, httpx.Client], size: Size, figure: Figure
) -> None:
    process, http = site
    count = size(25, 300)
    answers(http)
    before, rows = descriptors(process), free_rows(http)
    clients = [httpx.Client(base_url=http.base_url, timeout=WAIT_S, trust_env=False) for _ in range(count)]
    open_streams = []
    for number, client in enumerate(clients):
        body = BODY | {"messages": [{"role": "user", "content": f"Question {number}"}]}
        request = client.build_request("POST", "/v1/chat/completions", json=body)
        open_streams.append(client.send(request, stream=True))
    assert all(stream.status_code == 200 for stream in open_streams)
    until(lambda: answers(http) == count and free_rows(http) < rows)
    for client in clients:
        client.close()
    figure(f"{count} clients left: last answer ended after", until(lambda: answers(http) == 0), at_most=0.5, unit="s")
    figure("rows of KV given back after", until(lambda: free_rows(http) == rows), unit="s")
    until(lambda: descriptors(process) <= before)
