"""R7: a server that is told to stop writes its answers to their ends, and takes no new ones."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import configured
from tests.api.responses.test_resume import server
from tests.api.scripted import WAIT
from tests.postgres import home
from tests.reliability.conftest import Figure, Size
from tests.reliability.streams import Stream
from tests.reliability.test_long_questions import ended

TOKENS = 60


def test_streams_end_whole_and_late_requests_are_refused(tmp_path: Path, size: Size, figure: Figure) -> None:
    with server(tmp_path, *configured(tmp_path, "tuning.emulate = 'forward=20ms'")) as (process, http):
        url = str(http.base_url).rstrip("/")
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": TOKENS, "logit_bias": {"256": -100}}
        streams = [Stream(url, body | {"seed": seed}) for seed in range(size(8, 200))]
        for stream in streams:
            stream.wait_for(2)
        late: list[int] = []

        def ask_late() -> None:
            while process.poll() is None:
                try:
                    late.append(http.post("/v1/chat/completions", json={"model": "fake", **body}).status_code)
                except httpx.TransportError:
                    return  # it listens no more

        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        asking = threading.Thread(target=ask_late)
        asking.start()
        for stream in streams:
            stream.join()
        assert process.wait(WAIT) == 0
        figure("told to stop: ended after", time.monotonic() - began, at_most=30.0, unit="s")
        asking.join(WAIT)
    whole = [stream for stream in streams if stream.whole and stream.tokens == TOKENS]
    assert len(whole) == len(streams), [(stream.error, stream.reason, stream.tokens) for stream in streams]
    assert {*late} <= {200, 503}, "a request is written to its end, or refused"
    figure("streams whole", len(whole), at_least=len(streams))


@pytest.mark.usefixtures("kept")
def test_a_stopped_server_ends_background_responses_first(tmp_path: Path) -> None:
    with server(tmp_path, *configured(tmp_path, "tuning.emulate = 'forward=5ms'")) as (process, http):
        body = {"model": "fake", "input": "Hi", "background": True, "max_output_tokens": 50, "seed": 1}
        made = http.post("/v1/responses", json=body).json()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
    with server(tmp_path) as (_, http):
        kept = ended(http, made["id"]) if home(tmp_path) else http.get(f"/v1/responses/{made['id']}").json()
        assert kept["status"] in ("completed", "incomplete"), "before its end, or handed over to the next of a database"
