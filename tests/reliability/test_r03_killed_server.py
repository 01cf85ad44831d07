"""R3: the server is killed in mid-stream; its responses are continued from a new process over the same log."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.commands.demo import configured
from tests.api.responses.test_resume import events_in, read, server
from tests.api.scripted import WAIT
from tests.postgres import home
from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import quantile

STREAMS = 3


@pytest.mark.usefixtures("kept")
def test_every_event_comes_once_from_the_process_after_the_killed_one(
    tmp_path: Path, size: Size, rng: random.Random, figure: Figure
) -> None:
    """Also where the client is cut off a second time, before the first event."""
    waits, finished = [], None
    before: list[list[dict[str, Any]]] = []
    for _ in range(size(2, 67) + 1):
        started = time.monotonic()
        with server(tmp_path, *configured(tmp_path, "tuning.emulate = 'forward=20ms'")) as (process, http):
            for events in before:
                if events[-1]["type"] == "response.completed":  # the fake model may end at any token
                    assert http.get(f"/v1/responses/{events[0]['response']['id']}").json() == events[-1]["response"]
                    continue
                path = f"/v1/responses/{events[0]['response']['id']}"
                query = {"stream": "true", "starting_after": events[-1]["sequence_number"]}
                with http.stream("GET", path, params=query):
                    pass  # cut off before the first event
                rest = events_in(http.get(path, params=query).content)
                waits.append(time.monotonic() - started)
                check_continued(http, events, rest, goes_on=home(tmp_path) is not None)
            if finished is not None:
                assert http.get(f"/v1/responses/{finished['id']}").json() == finished
            finished = http.post("/v1/responses", json={"model": "fake", "input": "Hi", "max_output_tokens": 3}).json()

            def begin(events: int, http: httpx.Client = http) -> list[dict[str, Any]]:
                body = {"model": "fake", "input": "Hi", "stream": True, "background": True}
                body |= {"max_output_tokens": 200, "ignore_eos": True}  # four seconds: none ends before the kill
                with http.stream("POST", "/v1/responses", json=body) as answer:
                    return read(answer, events, extra=20)

            with ThreadPoolExecutor(STREAMS) as threads:
                before = list(threads.map(begin, [rng.randrange(6, 30) for _ in range(STREAMS)]))
            process.kill()
            process.wait(WAIT)
    figure("killed server: continued from the next process after, p95", quantile(waits, 0.95), at_most=5.0, unit="s")
    figure("streams continued", len(waits), at_least=1)


def check_continued(
    http: httpx.Client, before: list[dict[str, Any]], after: list[dict[str, Any]], *, goes_on: bool
) -> None:
    """Nothing is lost or repeated, and the interrupted response says that it is, or goes on to its end."""
    assert [event["sequence_number"] for event in [*before, *after]] == list(range(len(before) + len(after)))
    response = http.get(f"/v1/responses/{before[0]['response']['id']}").json()
    assert after[-1]["response"] == response
    if goes_on:
        assert after[-1]["type"] in ("response.completed", "response.incomplete")
    else:
        assert after[-1]["type"] == "response.failed" and response["error"]["code"] == "server_error"
        assert "the server was restarted" in response["error"]["message"].lower()
    deltas = [event["delta"] for event in [*before, *after] if event["type"] == "response.output_text.delta"]
    assert deltas and response["output"][0]["content"][0]["text"] == "".join(deltas)
