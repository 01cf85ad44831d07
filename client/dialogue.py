"""A conversation line by line, with its commands: a table from name to method."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path

from paceline.errors import PacelineError
from paceline.secret_files import write_private

from .conversation import Conversation
from .prompt import Lines, read_question
from .screen import Screen

PRIVACY = ("open", "document-private", "answer-private", "local-only")
HELP = {
    "/help": "show this",
    "/new": "begin a new conversation",
    "/model": "/model NAME: ask this model; without a name: list them",
    "/strategy": "/strategy NAME: have answers written so; auto: the server chooses",
    "/privacy": f"/privacy LEVEL: what may leave a device, {', '.join(PRIVACY)}",
    "/report": "show how the last answer was written",
    "/save": "/save FILE: write the conversation to a new file; .json: as messages, else as Markdown",
    "/quit": "end",
}
EDITING = (
    '""" begins and ends a question of several lines; // begins one with a slash. Ctrl-C stops an answer, Ctrl-D ends.'
)


class Dialogue:
    """Questions, answers and commands until the input ends."""

    def __init__(
        self, conversation: Conversation, screen: Screen, lines: Lines, *, fail: Callable[[str], None]
    ) -> None:
        """fail: is given the sentence of each failure, none of which ends the conversation."""
        self._conversation = conversation
        self._screen = screen
        self._lines = lines
        self._fail = fail
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/new": self._new,
            "/model": self._model,
            "/strategy": self._strategy,
            "/privacy": self._privacy,
            "/report": self._report,
            "/save": self._save,
        }

    def run(self) -> None:
        while (asked := read_question(self._lines)) is not None and asked.strip() != "/quit":
            if not asked.strip():
                continue
            try:
                self._take(asked.strip())
            except KeyboardInterrupt:
                self._screen.say("stopped")
            except PacelineError as error:
                self._fail(str(error))

    def _take(self, asked: str) -> None:
        if asked.startswith("/") and not asked.startswith("//"):
            name, _, argument = asked.partition(" ")
            self._command(name)(argument.strip())
            return
        self._screen.show(self._conversation.ask(asked.removeprefix("/") if asked.startswith("//") else asked))
        self._screen.show_sources(self._conversation.answer)

    def _command(self, name: str) -> Callable[[str], None]:
        if name not in self._commands:
            near = difflib.get_close_matches(name, HELP, n=1, cutoff=0.0)
            raise PacelineError(f"There is no {name}: did you mean {near[0]}? A question with a slash begins with //.")
        return self._commands[name]

    def _help(self, _: str) -> None:
        for name, text in HELP.items():
            self._screen.say(f"{name:<10} {text}")
        self._screen.say(EDITING)
        self._screen.show_legend()

    def _new(self, _: str) -> None:
        self._conversation.forget()
        self._screen.say("a new conversation")

    def _model(self, name: str) -> None:
        models = self._conversation.models()
        names = [str(model.get("id")) for model in models if _own(model).get("kind") != "embedding"]
        self._choose("model", name, names, self._conversation.model)

    def _strategy(self, name: str) -> None:
        models = self._conversation.models()
        known = sorted({strategy for model in models for strategy in _listed(_own(model), "strategies")} | {"auto"})
        self._choose("strategy", name, known, self._conversation.chosen("strategy") or "auto")

    def _privacy(self, name: str) -> None:
        self._choose("privacy", name, PRIVACY, self._conversation.chosen("privacy") or "the server's default")

    def _choose(self, what: str, name: str, known: list[str] | tuple[str, ...], now: str) -> None:
        if not name:
            self._screen.say(f"{what}: {now}; known: {', '.join(known)}")
            return
        if name not in known:
            raise PacelineError(f"There is no {what} {name}. Known: {', '.join(known)}.")
        self._conversation.choose(what, None if name == "auto" else name)
        self._screen.say(f"{what}: {name}")

    def _report(self, _: str) -> None:
        answer = self._conversation.answer
        if not answer.report:
            raise PacelineError("There is no report: ask something first.")
        shown = {**answer.report, "usage": answer.usage}
        self._screen.say(json.dumps(shown, indent=2, ensure_ascii=False))

    def _save(self, name: str) -> None:
        if not name:
            raise PacelineError("Name a file: /save talk.md")
        file = Path(os.path.expanduser(name))
        messages = self._conversation.messages
        text = json.dumps(messages, indent=2, ensure_ascii=False) if file.suffix == ".json" else _markdown(messages)
        try:
            written = write_private(file, text.encode(), replace=False)
        except OSError as error:
            raise PacelineError(f"{file} cannot be written: {error.strerror}.") from None
        if not written:
            raise PacelineError(f"{file} exists, and is not written over: name another.")
        self._screen.say(f"{len(messages)} messages in {file}")


def _markdown(messages: list[dict[str, str]]) -> str:
    return "\n".join(f"## {message['role'].capitalize()}\n\n{message['content']}\n" for message in messages)


def _own(model: object) -> dict[str, object]:
    """A model's `paceline` object; empty at other servers."""
    found = model.get("paceline") if isinstance(model, dict) else None
    return found if isinstance(found, dict) else {}


def _listed(own: dict[str, object], name: str) -> list[str]:
    found = own.get(name)
    return [str(each) for each in found] if isinstance(found, list) else []
