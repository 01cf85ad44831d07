"""Questions from the user: edited at a terminal, read line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.errors import ConfigError
from paceline.secret_files import write_private

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

QUOTES = '"""'


class Lines(Protocol):
    def read(self, prompt: str) -> str | None:
        """One line, or a pasted text of several; None at the end of the input."""


def read_question(lines: Lines) -> str | None:
    """The next question: a line, or what stands between two lines that begin and end with three quotation marks."""
    first = lines.read("> ")
    if first is None or not first.lstrip().startswith(QUOTES):
        return first
    text = first.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        more = lines.read(". ")
        if more is None:
            break
        text += f"\n{more}"
    return text.rstrip().removesuffix(QUOTES).strip()


class Pipe:
    """Standard input that is no terminal. Nothing is prompted for."""

    def read(self, prompt: str) -> str | None:  # noqa: ARG002  # for a terminal
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


class Terminal:
    """Standard input with editing, history and completion of commands; pasted lines stay together."""

    def __init__(self, commands: Iterable[str], history: Path | None = None) -> None:
        """history: file that keeps questions, of mode 0600; None: for this conversation only. Raises ConfigError."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        if history is not None:
            try:
                write_private(history, b"", replace=False)  # a file that exists stays as it is
            except OSError as error:
                raise ConfigError(f"The history cannot be kept in {history}: {error.strerror}.") from None
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            enable_open_in_editor=True,
        )

    def read(self, prompt: str) -> str | None:
        while True:
            try:
                return self._session.prompt(prompt)
            except KeyboardInterrupt:
                continue  # the line is given up, not the conversation
            except EOFError:
                return None
