"""The question to the owner at enrolment, on a real terminal, and that it is put once."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline.core.side import EVERYBODY, NOBODY, MayAsk
from paceline.runtime.asking import answered_for, permission
from paceline.settings import AgentSettings

pytestmark = pytest.mark.usefixtures("forks")
ROOT = Path(__file__).parents[2]
CLOUD = "https://cloud.example"
ASK = (
    "import sys\n"
    "from pathlib import Path\n"
    "from device_agent.activity import ask_owner\n"
    "from paceline.settings import AgentSettings\n"
    f"ask_owner(AgentSettings(cloud='{CLOUD}', code='K', state_dir=Path(sys.argv[1])))\n"
)


def ask(state: Path, typed: str | None) -> str:
    """What the owner is shown. typed: at a terminal; None: there is none."""
    command = [sys.executable, "-c", ASK, str(state)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if typed is None:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60
        )
        return done.stderr.decode()
    owner, terminal = pty.openpty()
    with closing(os.fdopen(owner, "r+b", buffering=0)) as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=terminal, stderr=terminal)
        os.close(terminal)
        stream.write(typed.encode())
        shown = b""
        try:
            while part := stream.read(4096):
                shown += part
        except OSError:
            pass  # the other end of the terminal has closed
        assert process.wait(60) == 0
    return shown.decode()


def settings(state: Path, **more: object) -> AgentSettings:
    return AgentSettings(state_dir=state, cloud=CLOUD, **more)  # type: ignore[arg-type]  # any of its fields


def test_an_owner_is_asked_once_and_the_answer_holds(tmp_path: Path) -> None:
    shown = ask(tmp_path, "a,,b\nnotebook, phone\n")
    assert "private documents" in shown and CLOUD in shown and "must be off, on, or up to" in shown
    assert permission(settings(tmp_path)) == (MayAsk(("notebook", "phone")), "as answered at enrolment")
    assert "may ask" not in ask(tmp_path, "")
    assert permission(settings(tmp_path, cloud_may_ask="on"))[0] == EVERYBODY


def test_an_owner_who_only_presses_return_or_has_no_terminal_lets_nobody_ask(tmp_path: Path) -> None:
    ask(tmp_path / "pressed", "\n")
    assert answered_for(tmp_path / "pressed", CLOUD) == NOBODY
    ask(tmp_path / "service", None)
    assert permission(settings(tmp_path / "service")) == (NOBODY, "the default")
