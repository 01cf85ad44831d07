"""`paceline serve` and `paceline agent` as real processes with the fake model: start, answer, stop."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from device_agent.commands import register as register_agent
from paceline import bootstrap
from paceline.api.http.server import listen
from paceline.commands.demo import configured
from paceline.errors import ConfigError
from server.commands import register as register_server
from tests.api.scripted import request

pytestmark = pytest.mark.slow

STARTER = (
    "import sys, typer, server.commands, device_agent.commands\n"
    "from paceline.errors import PacelineError\n"
    "app = typer.Typer(pretty_exceptions_enable=False)\n"
    "server.commands.register(app); device_agent.commands.register(app)\n"
    "try: app()\n"
    "except PacelineError as error: print(error, file=sys.stderr); sys.exit(2)\n"
)
ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", STARTER, *arguments]


def started(*arguments: str, log: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """A program with the fake model on a free port."""
    return subprocess.Popen(
        command(*arguments, "--model", "fake", "--port", "0"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@contextmanager
def program(*arguments: str, log: int = subprocess.DEVNULL) -> Iterator[str]:
    """The URL of a running program, stopped by SIGTERM."""
    process = started(*arguments, log=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(r"paceline: serving fake on (http://127\.0\.0\.1:\d+) \(0 documents\)\n", line)
        assert ready is not None, line
        yield ready[1]
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")


def both_programs() -> typer.Typer:
    app = typer.Typer()
    register_server(app)
    register_agent(app)
    return app


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("side", ["serve", "agent"])
def test_a_folder_of_documents_or_answers_that_others_may_write_is_refused(tmp_path: Path, side: str) -> None:
    folders = {"--docs-dir": tmp_path / "docs", "--state-dir": tmp_path / "state"}
    arguments = [argument for name, each in folders.items() for argument in (name, str(each))]
    for each in folders.values():
        each.mkdir(exist_ok=True)
        each.chmod(0o777)
        ended = CliRunner().invoke(both_programs(), [side, *arguments, "--model", "fake", "--port", "0"])
        assert isinstance(ended.exception, ConfigError) and f"Others may write to {each}" in str(ended.exception)
        each.chmod(0o755)
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
    with program(side, *arguments) as url:
        answer = request("POST", f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "paceline" not in answer.json(), "alone"
        assert [each.stat().st_mode & 0o777 for each in folders.values()] == [0o700] * 2


@pytest.mark.usefixtures("forks")
def test_a_server_whose_log_nobody_reads_answers_and_stops(tmp_path: Path) -> None:
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with suppress(BlockingIOError):
        while True:
            os.write(full, bytes(select.PIPE_BUF))
    os.set_blocking(full, True)
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
    try:
        with program("serve", "--state-dir", str(tmp_path / "state"), log=full) as url:
            assert request("POST", f"{url}/v1/chat/completions", json=body).status_code == 200
    finally:
        os.close(full)
        os.close(unread)


def test_what_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    app = both_programs()
    state = ["--state-dir", str(tmp_path), "--model", "fake", "--port", "0"]
    for arguments, word in (
        (["serve", "--host", "0.0.0.0"], "paceline keys create"),
        (["agent", "--host", "0.0.0.0"], "--api-keys"),
        (["serve", *configured(tmp_path, "tuning.emulate = 'rtt=fast'")], "rtt"),
        (["serve", "--api-keys", "a=phone", "--api-keys", "a=laptop"], "two devices"),
        (["agent", "--cloud", "http://127.0.0.1:1"], "devices add"),
    ):
        ended = CliRunner().invoke(app, [*arguments, *state])
        assert isinstance(ended.exception, ConfigError), ended.output
        assert word in str(ended.exception)


def test_a_port_that_is_taken_is_a_sentence() -> None:
    listener = listen("127.0.0.1", 0)
    with closing(listener), pytest.raises(ConfigError, match="--port"):
        listen("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ConfigError, match="this machine"):
        listen("192.0.2.1.invalid", 0)


def test_a_program_whose_output_takes_no_line_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def serve(*_: object, on_ready: Callable[[], None], **__: object) -> None:
        on_ready()
        served.append(True)

    monkeypatch.setattr(bootstrap.typer, "echo", full)
    monkeypatch.setattr(bootstrap, "serve", serve)
    ended = CliRunner().invoke(
        both_programs(), ["serve", "--model", "fake", "--port", "0", "--state-dir", str(tmp_path)]
    )
    assert (ended.exit_code, served) == (0, [True])
