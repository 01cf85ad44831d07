"""Responses survive the loss of clients and of the server: every event is received exactly once."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.runtime.service import TextDelta
from tests.api.scripted import WAIT, Script, ScriptedService, Signal, client_of, done, serving
from tests.server.test_programs import started

pytestmark = pytest.mark.slow

INTERRUPTIONS = 100
EVENT = re.compile(rb"event: (\S+)\ndata: ([^\n]*)\n\n")


def events_in(received: bytes) -> list[dict[str, Any]]:
    """The complete events in these bytes."""
    events = []
    for match in EVENT.finditer(received):
        event = json.loads(match[2])
        assert event["type"] == match[1].decode()
        events.append(event)
    return events


def read(answer: httpx.Response, events: int, extra: int = 0) -> list[dict[str, Any]]:
    """Read that many complete events and `extra` bytes more, or up to the end of the stream."""
    received = bytearray()
    enough: int | None = None
    for part in answer.iter_raw(chunk_size=7):
        received += part
        if enough is None and len(EVENT.findall(received)) >= events:
            enough = len(received) + extra
        if enough is not None and len(received) >= enough:
            break
    return events_in(bytes(received[:enough]))


def test_interrupted_a_hundred_times_at_random_every_event_comes_exactly_once(tmp_path: Path) -> None:
    chance = random.Random(4)
    groups = [[f"{group}.{piece} " for piece in range(chance.randint(1, 9))] for group in range(INTERRUPTIONS)]
    gates = [Signal() for _ in groups]
    service = ScriptedService()
    steps = [
        step for gate, group in zip(gates, groups, strict=True) for step in (gate, *(TextDelta(t, 1) for t in group))
    ]
    service.script = Script([*steps, done()])
    received: list[dict[str, Any]] = []
    with serving(service, state=tmp_path) as url, client_of(url) as http:
        written = 2  # created, in_progress
        for interruption, (gate, group) in enumerate(zip(gates, groups, strict=True)):
            if interruption == 0:
                body = {"model": "scripted", "input": "Hi", "stream": True, "background": True}
                asking = http.stream("POST", "/v1/responses", json=body)
            else:
                query = {"stream": "true", "starting_after": received[-1]["sequence_number"]}
                asking = http.stream("GET", f"/v1/responses/{received[0]['response']['id']}", params=query)
            with asking as answer:
                gate.set()
                written += len(group) + (2 if interruption == 0 else 0)  # output_item.added, content_part.added
                # Disconnect between two events or within one, of those already sent.
                wanted = chance.randint(1 if interruption == 0 else 0, written - len(received))
                more = written - len(received) - wanted
                if wanted:
                    received += read(answer, wanted, chance.randint(0, 150) if more else 0)
        query = {"stream": "true", "starting_after": received[-1]["sequence_number"]}
        with http.stream("GET", f"/v1/responses/{received[0]['response']['id']}", params=query) as answer:
            received += events_in(answer.read())
        assert [event["sequence_number"] for event in received] == list(range(len(received)))
        assert received[-1]["type"] == "response.completed"
        text = "".join(event["delta"] for event in received if event["type"] == "response.output_text.delta")
        assert text == "".join(text for group in groups for text in group)
        whole = http.get(f"/v1/responses/{received[0]['response']['id']}", params={"stream": "true"})
        assert events_in(whole.content) == received


# ---- real programs --------------------------------------------------------------------------------------------------
@contextmanager
def server(state: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The server program with the fake model, killed at the end."""
    process = started("serve", "--state-dir", str(state), *arguments)
    try:
        assert process.stdout is not None
        ready = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert ready is not None
        with client_of(ready[0]) as http:
            yield process, http
    finally:
        process.kill()
        process.communicate(timeout=WAIT)
