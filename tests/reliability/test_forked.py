"""Programs that are forked behave as if they had been started by exec, for themselves and for who starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.commands.demo import command
from tests.reliability.forked import USUAL, starting

SAYS = (
    "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ), os.getcwd(), sys.stdin.read()])); sys.exit(3)"
)
WAITS = "import signal, sys; print('here', flush=True); signal.pause()"


def test_a_program_has_its_own_arguments_environment_directory_and_streams(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SAYS, "one", "two"]
    done = subprocess.run(arguments, env={"A": "b"}, cwd=tmp_path, input="text", capture_output=True, text=True)
    said, environment, where, read = json.loads(done.stdout)
    assert (said, where, read, done.stderr) == (["-c", "one", "two"], str(tmp_path), "text", "")
    assert environment["A"] == "b" and "HOME" not in environment
    assert done.returncode == 3


def test_a_program_is_a_child_in_a_session_of_its_own_and_its_end_is_told() -> None:
    arguments = [sys.executable, "-c", WAITS]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        assert psutil.Process(process.pid).ppid() == os.getpid()
        assert os.getsid(process.pid) == process.pid and process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_a_command_that_cannot_be_carried_out_says_so(tmp_path: Path) -> None:
    arguments = command("devices", "revoke", "nobody", "--state-dir", str(tmp_path))
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 2 and "There is no device nobody" in done.stderr and not done.stdout


def test_programs_start_by_exec_where_that_is_asked_for(request: pytest.FixtureRequest) -> None:
    def its_arguments() -> list[str]:
        with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"here\n"
            found = psutil.Process(process.pid).cmdline()
            process.kill()
        return found

    assert (WAITS in its_arguments()) == bool(request.config.getoption("nightly", default=False))
    with starting(USUAL):
        assert WAITS in its_arguments()
