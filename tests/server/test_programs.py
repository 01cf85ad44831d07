"""`paceline serve` and `paceline agent` as real processes with the fake model: start, link, answer, stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from device_agent.commands import register as register_agent
from paceline.api.http.server import listen
from paceline.commands.demo import configured
from paceline.errors import ConfigError
from server.commands import register as register_server
from server.devices import Registry
from tests.api.scripted import request
from tests.forked import USUAL, starting

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]

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


@contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running program and its URL, stopped by SIGTERM."""
    process = subprocess.Popen(
        command(*arguments, "--model", "fake", "--port", "0"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(r"paceline: serving fake on (http://127\.0\.0\.1:\d+) \(0 documents\)\n", line)
        assert ready is not None, line
        yield process, ready[1]
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")


def both_programs() -> typer.Typer:
    app = typer.Typer()
    register_server(app)
    register_agent(app)
    return app


def ask(url: str, **fields: object) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 7}
    return request("POST", f"{url}/v1/chat/completions", json=body | fields)


def test_a_server_and_an_agent_link_and_either_can_be_asked(tmp_path: Path) -> None:
    code = Registry(tmp_path / "cloud").add("phone")
    with program("serve", "--state-dir", str(tmp_path / "cloud")) as (_, server):
        arguments = ("agent", "--state-dir", str(tmp_path / "device"), "--cloud", server, "--code", code)
        arguments += ("--cloud-may-ask", "on")
        with program(*arguments) as (_, agent):
            # The agent serves before it is linked: an answer that the server's device joins shows that it is.
            joined = next(answer for answer in _until(server) if answer.status_code == 200)
            assert joined.json()["usage"]["completion_tokens"] <= 12
            texts = {ask(url).json()["choices"][0]["message"]["content"] for url in (server, agent)}
            assert len(texts) == 1  # one model, one seed, one text
        for asked in ({"device": "phone"}, {}):  # while it was linked, both were joined
            alone = ask(server, paceline=asked)
            assert alone.json()["paceline"] == {"degraded": "device_missing", "why": "the device is not linked"}
            for on_loss in ("pause", "fail"):
                refused = ask(server, paceline={**asked, "on_device_loss": on_loss})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "device_missing")
        Registry(tmp_path / "cloud").revoke("phone")
        assert any("paceline" not in ask(server).json() for _ in range(400)), "none belongs to it any more"
        assert ask(server, paceline={"on_device_loss": "fail"}).status_code == 503


@pytest.mark.parametrize("folder", ["--docs-dir", "--state-dir"])
@pytest.mark.parametrize("side", ["serve", "agent"])
def test_a_folder_of_documents_or_answers_that_others_may_write_is_refused(
    tmp_path: Path, side: str, folder: str
) -> None:
    folders = {"--docs-dir": tmp_path / "docs", "--state-dir": tmp_path / "state"}
    for each in folders.values():
        each.mkdir()
    arguments = [argument for name, each in folders.items() for argument in (name, str(each))]
    folders[folder].chmod(0o777)
    ended = CliRunner().invoke(both_programs(), [side, *arguments, "--model", "fake", "--port", "0"])
    assert isinstance(ended.exception, ConfigError) and f"Others may write to {folders[folder]}" in str(ended.exception)
    folders[folder].chmod(0o755)
    with program(side, *arguments):
        assert folders[folder].stat().st_mode & 0o777 == 0o700


def _until(url: str) -> Iterator[httpx.Response]:
    """Request answers that need the device until one is generated with it."""
    for _ in range(400):
        answer = ask(url, paceline={"device": "phone", "strategy": "aggregate"})
        if "paceline" not in answer.json():
            yield answer
    pytest.fail("the device has not linked")


def test_an_agent_without_a_cloud_serves_alone(tmp_path: Path) -> None:
    with program("agent", "--state-dir", str(tmp_path)) as (_, url):
        answer = ask(url)
        assert answer.status_code == 200 and "paceline" not in answer.json()


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


def test_a_program_starts_without_libraries_that_it_may_not_need() -> None:
    """torch takes seconds and 200 MB, which the fake model does without; the official client's types take a second."""
    code = (
        "import sys, paceline.server.program, paceline.device_agent.program; "
        "print({'openai', 'torch', 'transformers'} & {*sys.modules} or 'none')"
    )
    with starting(USUAL):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "none"
