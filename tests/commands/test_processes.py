"""Child processes of the demonstration: waited for, shown when they fail, never left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from paceline.commands.demo import Children, Readiness, clean_environment, free_port
from paceline.errors import PacelineError

SERVER = """
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"linked": True}).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".part", sys.argv[1])
signal.pause()
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_a_program_is_ready_when_its_readyz_says_so_and_gone_afterwards(tmp_path: Path) -> None:
    port = free_port(0)
    seen: list[Sequence[Readiness | None]] = []

    def ready(said: Sequence[Readiness | None]) -> bool:
        seen.append(said)
        return all(said)

    with Children(tmp_path) as children:
        child = children.start("server", python(SERVER, str(port)), port=port)
        children.wait(ready)
        children.check()
        assert child.process.poll() is None
    assert seen[-1] == [{"linked": True}]
    assert not psutil.pid_exists(child.process.pid)


def test_a_program_that_ends_too_early_is_shown_with_what_it_said(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("server", python("print('first line'); raise SystemExit('no such model')"), port=1)
        with pytest.raises(PacelineError) as error:
            children.wait(lambda said: all(said))
    assert "server ended with code 1" in str(error.value)
    assert "  server | no such model" in str(error.value)


def test_a_program_that_is_never_ready_is_shown_when_time_is_up(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("server", python("import signal; signal.pause()"), port=free_port(0))
        with pytest.raises(PacelineError, match="not ready after 0 s"):
            children.wait(lambda said: all(said), timeout=0.0)


def test_a_program_that_will_not_end_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.commands.demo.STOP_S", 0.1)
    said = tmp_path / "grandchild"
    with Children(tmp_path) as children:
        child = children.start("stubborn", python(STUBBORN, str(said)), port=1)
        children.wait(lambda _: said.exists())
        grandchild = psutil.Process(int(said.read_text()))
    assert child.process.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs([grandchild], timeout=5)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_program_is_left_behind_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, Children(tmp_path) as children:
            child = children.start("server", python("import signal; signal.pause()"), port=1)
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
        assert child.process.poll() is not None
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_program_that_ends_by_itself_gives_its_output_or_its_sentence(tmp_path: Path) -> None:
    children = Children(tmp_path)
    assert children.run(python("print('{}')")) == "{}\n"
    with pytest.raises(PacelineError, match="no such device"):
        children.run(python("raise SystemExit('no such device')"))


def test_the_users_own_settings_do_not_reach_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MODEL", "enormous")
    assert "PACELINE_MODEL" not in clean_environment(os.environ)
    assert Children(tmp_path).run(python("import os; print(os.environ.get('PACELINE_MODEL'))")) == "None\n"


def test_the_preferred_port_is_taken_unless_somebody_listens_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert free_port(number) != number
    assert free_port(number) == number
