"""`paceline chat` in a pseudo-terminal, as a user has it: keys are pressed, and what is shown is read."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.commands.demo import clean_environment, command
from paceline.runtime.service import TextDelta
from tests.api.scripted import Script, ScriptedService, done

pytestmark = pytest.mark.usefixtures("forks")
WAIT = 60.0  # s
UP, LEFT, CTRL_C, CTRL_D, CTRL_U = "\x1b[A", "\x1b[D", "\x03", "\x04", "\x15"
PROMPT = "\x1b[?2004h"  # a line is read: what is pasted arrives in brackets
PASTE = "\x1b[200~{}\x1b[201~"


class Terminal:
    """What the program has written, and its keyboard."""

    def __init__(self, process: subprocess.Popen[bytes], keyboard: int) -> None:
        self.process = process
        self.shown = ""
        self._keyboard = keyboard
        self._seen = 0
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._keyboard, 65536)
            except OSError:  # the program has ended
                data = b""
            with self._more:
                self.shown += data.decode("utf-8", "replace")
                self._more.notify_all()
            if not data:
                return

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def enter(self, keys: str) -> None:
        """Press keys, and the enter key, once a line is read: before, the terminal itself would take them."""
        self.wait(PROMPT)
        self.press(f"{keys}\r")

    def wait(self, text: str) -> str:
        """What is shown up to and including `text`, after what was waited for before."""
        with self._more:
            assert self._more.wait_for(lambda: text in self.shown[self._seen :], WAIT), self.shown[self._seen :]
            end = self.shown.index(text, self._seen) + len(text)
            found, self._seen = self.shown[self._seen : end], end
            return found


@contextmanager
def chatting(url: str, *flags: str) -> Iterator[Terminal]:
    keyboard, screen = pty.openpty()
    termios.tcsetwinsize(screen, (40, 120))
    env = clean_environment(dict(os.environ)) | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        command("chat", "--url", url, *flags),
        stdin=screen,
        stdout=screen,
        stderr=screen,
        env=env,
        start_new_session=True,
    )
    os.close(screen)
    try:
        yield Terminal(process, keyboard)
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)


def asked(service: ScriptedService) -> list[str]:
    """The last question of each request."""
    return [str(request.prompt.messages[-1]["content"]) for request in service.requests]


def test_lines_are_edited_remembered_pasted_and_quoted(url: str, service: ScriptedService, tmp_path: Path) -> None:
    with chatting(url, "--history", str(tmp_path / "history")) as terminal:
        terminal.enter(f"Whre?{LEFT * 3}e")
        terminal.wait("there.")
        terminal.enter(f"{UP} again")
        terminal.wait("there.")
        terminal.enter(PASTE.format("one\rtwo"))
        terminal.wait("there.")
        terminal.enter('"""first')
        terminal.enter('second"""')
        terminal.wait("there.")
        for key in (CTRL_C, CTRL_D):
            terminal.enter('"""given up')
            terminal.wait(PROMPT)
            terminal.press(key)
        terminal.wait(PROMPT)
        terminal.press(CTRL_D)
        assert terminal.process.wait(WAIT) == 0
    assert asked(service) == ["Where?", "Where? again", "one\ntwo", "first\nsecond"]
    kept = tmp_path / "history"
    assert "Where?" in kept.read_text() and kept.stat().st_mode & 0o777 == 0o600


def test_commands_are_not_sent_as_questions(url: str, service: ScriptedService, tmp_path: Path) -> None:
    service.script = Script([TextDelta("Yes", 1, "cloud"), TextDelta(" no", 1, "device"), done()])
    file = tmp_path / "talk.md"
    with chatting(url) as terminal:
        terminal.wait("device's documents")
        assert "\x1b[36mwords from the cloud's documents" in terminal.shown, "a legend"
        terminal.enter("/help")
        assert "/strategy NAME" in terminal.wait("Ctrl-D ends")
        terminal.enter("/hlep")
        terminal.wait("did you mean /help?")
        terminal.enter("/privacy local-only")
        terminal.wait("privacy: local-only")
        terminal.enter("/privacy everything")
        terminal.wait("There is no privacy everything")
        terminal.enter("/strategy")
        terminal.wait("known: ")
        terminal.enter("/model")
        terminal.wait("scripted")
        terminal.enter("//etc?")
        assert "\x1b[36mYes" in terminal.wait("\x1b[35m no"), "each side's colour"
        terminal.enter("/report")
        terminal.wait('"strategy"')
        terminal.enter("/how")
        terminal.wait("There is no timeline")
        terminal.enter(f"/save {file}")
        terminal.wait("2 messages")
        terminal.enter(f"/save {file}")
        terminal.wait("is not written over")
        terminal.enter("/new")
        terminal.wait("a new conversation")
        terminal.enter("Once more")
        terminal.wait("\x1b[35m no")
        terminal.enter("/quit")
        assert terminal.process.wait(WAIT) == 0
    assert asked(service) == ["/etc?", "Once more"]
    assert [len(request.prompt.messages) for request in service.requests] == [1, 1]
    assert service.requests[0].wish.privacy == "local-only"
    assert file.read_text() == "## User\n\n/etc?\n\n## Assistant\n\nYes no\n" and file.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_gives_a_line_up_and_not_the_conversation(url: str, service: ScriptedService) -> None:
    with chatting(url) as terminal:
        terminal.wait(PROMPT)
        terminal.press(f"Not this{CTRL_C}")
        terminal.enter("This")
        terminal.wait("there.")
        terminal.wait(PROMPT)
        terminal.press(f"Nor that{CTRL_U}{CTRL_D}")
        assert terminal.process.wait(WAIT) == 0
    assert asked(service) == ["This"]
