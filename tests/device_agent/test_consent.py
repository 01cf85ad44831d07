"""The question to the owner at enrolment, on a real terminal, and that it is put once."""

from __future__ import annotations

import os
import pty
import sys
from contextlib import closing
from pathlib import Path

import pytest

from device_agent.activity import ask_owner
from paceline.core.side import EVERYBODY, NOBODY, MayAsk
from paceline.runtime.asking import answered_for, permission
from paceline.settings import AgentSettings

CLOUD = "https://cloud.example"


def settings(state: Path, **more: object) -> AgentSettings:
    return AgentSettings(state_dir=state, cloud=CLOUD, **more)  # type: ignore[arg-type]  # any of its fields


def ask(state: Path, typed: str) -> str:
    """Lines that the owner is shown at a terminal."""
    owner, terminal = pty.openpty()
    shown = b""
    with closing(os.fdopen(owner, "r+b", buffering=0)) as stream:
        with pytest.MonkeyPatch.context() as patched, open(os.dup(terminal)) as typing, open(terminal, "w") as showing:
            patched.setattr(sys, "stdin", typing)
            patched.setattr(sys, "stderr", showing)
            stream.write(typed.encode())
            ask_owner(settings(state, code="K"))
        try:
            while part := stream.read(4096):
                shown += part
        except OSError:
            pass  # the other end of the terminal has closed
    return shown.decode()


def test_an_owner_is_asked_once_and_the_answer_holds(tmp_path: Path) -> None:
    shown = ask(tmp_path, "a,,b\nnotebook, phone\n")
    assert "private documents" in shown and CLOUD in shown and "must be off, on, or up to" in shown
    assert permission(settings(tmp_path)) == (MayAsk(("notebook", "phone")), "as answered at enrolment")
    assert "may ask" not in ask(tmp_path, "off\n")
    assert permission(settings(tmp_path, cloud_may_ask="on"))[0] == EVERYBODY


def test_an_owner_who_only_presses_return_or_has_no_terminal_lets_nobody_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(tmp_path / "pressed", "\n")
    assert answered_for(tmp_path / "pressed", CLOUD) == NOBODY
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        ask_owner(settings(tmp_path / "service", code="K"))
    assert permission(settings(tmp_path / "service")) == (NOBODY, "the default")
