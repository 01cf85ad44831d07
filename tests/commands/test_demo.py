"""Parts of `paceline demo`; the whole command runs in tests/e2e."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from rich.console import Console

from paceline.commands import demo
from paceline.commands.demo import Answer, Child, Question, Readiness, Silent, free_port, linked
from paceline.errors import PacelineError

QUESTION = Question("When?", ("nine",), ("cloud",))


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """A program that has written a line and ended."""
    log = tmp_path / "cloud.log"
    log.write_text("out of memory\n")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return Child("cloud", process, log, f"http://127.0.0.1:{free_port(0)}")


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("readiness", "expected"),
    [
        ([{"linked": True}, {"linked": True}], True),
        ([{"linked": True}, {"linked": False}], False),
        ([{"linked": True}, {}], False),
        ([{"linked": True}, None], False),
    ],
)
def test_both_sides_must_see_the_other(readiness: list[Readiness | None], expected: bool) -> None:
    assert linked(readiness) is expected


def test_a_request_that_fails_is_a_fault_shown_with_the_programs_output(console: Console, child: Child) -> None:
    assert demo._put(console, child, QUESTION, check=True)
    assert "FAIL: the request to http://127.0.0.1" in printed(console)
    assert "cloud | out of memory" in printed(console)


@pytest.mark.parametrize(
    ("text", "check", "verdict"),
    [("at nine", True, "PASS"), ("at ten", True, "FAIL: 'nine' is not in the answer"), ("at ten", False, None)],
)
def test_an_answer_is_judged_only_if_asked_to(
    console: Console, child: Child, monkeypatch: pytest.MonkeyPatch, text: str, check: bool, verdict: str | None
) -> None:
    answer = Answer([(text, "cloud")], [("cloud", "museum.md")], "aggregate")

    def ask(_client: object, _question: str, show: object) -> Answer:
        assert callable(show)
        show(text, "cloud")
        return answer

    monkeypatch.setattr(demo, "ask", ask)
    wrong = demo._put(console, child, QUESTION, check=check)
    assert wrong is (verdict is not None and verdict != "PASS")
    assert text in printed(console)
    assert (verdict in printed(console)) if verdict else "FAIL" not in printed(console)


class Slow(BaseHTTPRequestHandler):
    """A server that is at work for long before its first token, and says so; `ends`: not even that any more."""

    signs = 4
    ends = False

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"object": "list", "data": [{"id": "demo"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._send("text/event-stream", b"")
        for _ in range(self.signs):
            time.sleep(0.3)
            self.wfile.write(b": ping\n\n")
            self.wfile.flush()
        if self.ends:
            self.rfile.read(1)  # until the client has gone
            return
        chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "at nine"}}]}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(content)


@pytest.mark.parametrize("ends", [False, True], ids=["an answer at last", "no answer"])
def test_a_slow_machine_is_waited_for_and_named_and_is_no_fault_of_an_answer(
    console: Console, child: Child, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(demo, "SILENCE_S", 1.0)  # less than the whole wait, more than between two signs of life
    monkeypatch.setattr(demo, "FIRST_TOKEN_S", 1.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Slower", (Slow,), {"ends": ends}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        slow = replace(child, url=f"http://127.0.0.1:{server.server_port}")
        assert demo._put(console, slow, QUESTION, check=False) is ends
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    told = printed(console)
    assert "FAIL" not in told
    if ends:
        assert "slow machine: nothing came from" in told and "for 1.0 s" in told
    else:
        assert "at nine" in told and "slow machine: the first token came after" in told


def test_the_state_is_removed_or_kept_as_asked(console: Console) -> None:
    with demo._state_directory(console, keep=False) as gone:
        (gone / "file").write_text("x")
    assert not gone.exists()
    with pytest.raises(PacelineError), demo._state_directory(console, keep=True) as kept:
        raise PacelineError("anything")
    assert kept.is_dir()
    assert str(kept) in printed(console)
    kept.rmdir()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order_and_the_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(typer.Exit) as end, demo._ended_by_signals():
        os.kill(os.getpid(), number)
        signal.pause()
    assert end.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_an_answer_that_does_not_end_is_given_up() -> None:
    with pytest.raises(Silent, match=r"no whole answer within 0\.01 s"), demo._within(0.01):
        signal.pause()
    with demo._within(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
