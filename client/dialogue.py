"""A conversation line by line, with its commands: methods, of which HELP is the table."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rich.console import Console

from paceline.core.printable import printable, printable_lines
from paceline.errors import ConfigError, PacelineError
from paceline.secret_files import write_private

from .conversation import REASONING, Answer, Conversation, Json

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


QUOTES = '"""'
_MORE = ". "  # before each further line of a question


class Lines(Protocol):
    def read(self, prompt: str) -> str | None:
        """One line, or a pasted text of several; None at the end of the input. Raises GivenUpError."""


class GivenUpError(Exception):
    """Gives up what has been written of a question: it is not sent."""


def read_question(lines: Lines) -> str | None:
    """The next question: a line, or what stands between two lines that begin and end with three quotation marks."""
    while True:
        with suppress(GivenUpError):
            return _question(lines)


def _question(lines: Lines) -> str | None:
    first = lines.read("> ")
    if first is None or not first.lstrip().startswith(QUOTES):
        return first
    text = first.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        more = lines.read(_MORE)
        if more is None:
            break
        text += f"\n{more}"
    return text.rstrip().removesuffix(QUOTES).strip()


class PipedInput:
    """Standard input that is no terminal. Nothing is prompted for."""

    def read(self, prompt: str) -> str | None:  # noqa: ARG002  # for a terminal
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


class Terminal:
    """Standard input with editing, history and completion of commands; pasted lines stay together."""

    def __init__(self, commands: Iterable[str], history: Path | None = None) -> None:
        """history: file that keeps questions, of mode 0600; None: for this conversation only. Raises ConfigError."""
        try:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.completion import WordCompleter
            from prompt_toolkit.history import FileHistory, InMemoryHistory
        except ModuleNotFoundError:
            raise ConfigError(
                "A conversation at a terminal needs prompt-toolkit: run `pip install 'paceline[chat]'`, or ask one "
                'question: paceline chat "When does the museum open?"'
            ) from None
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
        try:
            return self._session.prompt(prompt)
        except KeyboardInterrupt:
            raise GivenUpError from None
        except EOFError:
            if prompt == _MORE:
                raise GivenUpError from None
            return None


COLOURS = {"cloud": "cyan", "device": "magenta"}  # by lane; text without a lane has the terminal's colour
DEGRADED = {
    "device_lost": "the device was lost in mid-answer; the cloud went on alone",
    "cloud_lost": "the cloud was lost in mid-answer; the device went on alone",
    "device_missing": "no device took part",
    "cloud_missing": "the cloud took no part",
    "device_refused": "the device did not take part",
    "cloud_refused": "the cloud did not take part",
}


class Screen:
    """Answers in a terminal: each side's words in its colour, then the citations; without control characters."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def show(self, pieces: Iterable[tuple[str, str | None]]) -> None:
        """Write the pieces as they arrive; if any was written, end the line even after an error. Reasoning is dim, and
        left out where this is no terminal."""
        begun = thinks = False
        try:
            for text, lane in pieces:
                if lane == REASONING and not self._console.is_terminal:
                    continue
                if thinks and lane != REASONING:
                    self._console.print("\n")
                thinks = lane == REASONING
                begun = True
                self.say(text, "dim italic" if thinks else COLOURS.get(lane or "", ""), end="")
        finally:
            if begun:
                self._console.print()

    def show_sources(self, answer: Answer) -> None:
        for number, citation in enumerate(citations_of(answer), 1):
            self.show_source(number, citation)
        degraded = answer.report.get("degraded")
        if degraded:
            why = f": {answer.report.get('why')}" if str(degraded).endswith("_refused") else ""
            self.say(printable(f"Note: {DEGRADED.get(str(degraded), degraded)}{why}."), "yellow")
        if answer.finish_reason == "length":
            self.say("Note: cut at the limit of tokens; give more with --max-tokens.", "yellow")

    def show_source(self, number: int, citation: Mapping[str, object]) -> None:
        side = str(citation.get("side", ""))
        named = citation.get("document") or "a private document"
        place = f", {citation['place']}" if citation.get("place") else ""
        # On one line: a name must not pass for a further source.
        self.say(printable(f"[{number}] {named}{place} ({side})"), f"dim {COLOURS.get(side, '')}".strip())

    def show_legend(self) -> None:
        """Write which side's words have which colour; nothing where there are no colours."""
        if self._console.color_system is None:
            return
        for side, colour in COLOURS.items():
            self.say(f"words from the {side}'s documents  ", colour, end="")
        self._console.print()

    def say(self, text: str, style: str = "dim", end: str = "\n") -> None:
        self._console.print(printable_lines(text), style=style, end=end, markup=False, highlight=False, soft_wrap=True)


def citations_of(answer: Answer) -> list[dict[str, object]]:
    """Citations of the answer, in the order of their numbers."""
    found = answer.report.get("citations")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


PRIVACY = ("open", "document-private", "answer-private", "local-only")
HELP = {
    "/help": "show this",
    "/new": "begin a new conversation",
    "/model": "/model NAME: ask this model; without a name: list them",
    "/strategy": "/strategy NAME: have answers written so; auto: the server chooses",
    "/privacy": f"/privacy LEVEL: what may leave a device, {', '.join(PRIVACY)}",
    "/docs": "list the documents that are read for every answer",
    "/source": "/source N: show the passage behind source N of the last answer",
    "/report": "show how the last answer was written",
    "/how": "show what each side did when, and what went over the link, for the last answer",
    "/save": "/save FILE: write the conversation to a new file; .json: as messages, else as Markdown",
    "/quit": "end",
}
EDITING = (
    '""" begins and ends a question of several lines; // begins one with a slash. Ctrl-C stops an answer, Ctrl-D ends.'
)


@dataclass(frozen=True)
class Dialogue:
    """Questions and commands until the end of the lines: each command is the method of its name."""

    conversation: Conversation
    screen: Screen
    lines: Lines
    fail: Callable[[str], None]  # is given the sentence of each failure, none of which ends the conversation

    def run(self) -> None:
        while (asked := read_question(self.lines)) is not None and asked.split()[:1] != ["/quit"]:
            if not asked.strip():
                continue
            try:
                self._take(asked.strip())
            except KeyboardInterrupt:
                self.screen.say("stopped")
            except PacelineError as error:
                self.fail(str(error))

    def _take(self, asked: str) -> None:
        if asked.startswith("/") and not asked.startswith("//"):
            name, _, argument = asked.partition(" ")
            self._command(name)(argument.strip())
            return
        self.screen.show(self.conversation.ask(asked.removeprefix("/") if asked.startswith("//") else asked))
        self.screen.show_sources(self.conversation.answer)

    def _command(self, name: str) -> Callable[[str], None]:
        if name not in HELP:
            near = difflib.get_close_matches(name, HELP, n=1, cutoff=0.0)
            raise PacelineError(f"There is no {name}: did you mean {near[0]}? A question with a slash begins with //.")
        method: Callable[[str], None] = getattr(self, name.replace("/", "_"))
        return method

    def _help(self, _: str) -> None:
        for name, text in HELP.items():
            self.screen.say(f"{name:<10} {text}")
        self.screen.say(EDITING)
        self.screen.show_legend()

    def _new(self, _: str) -> None:
        self.conversation.forget()
        self.screen.say("a new conversation")

    def _model(self, name: str) -> None:
        models = self.conversation.models()
        names = [str(model.get("id")) for model in models if _own(model).get("kind") != "embedding"]
        self._choose("model", name, names, self.conversation.model)

    def _strategy(self, name: str) -> None:
        models = self.conversation.models()
        known = sorted({strategy for model in models for strategy in _listed(_own(model), "strategies")} | {"auto"})
        self._choose("strategy", name, known, self.conversation.chosen("strategy") or "auto")

    def _privacy(self, name: str) -> None:
        self._choose("privacy", name, PRIVACY, self.conversation.chosen("privacy") or "the server's default")

    def _choose(self, what: str, name: str, known: list[str] | tuple[str, ...], now: str) -> None:
        if not name:
            self.screen.say(f"{what}: {now}; known: {', '.join(known)}")
            return
        if name not in known:
            raise PacelineError(f"There is no {what} {name}. Known: {', '.join(known)}.")
        self.conversation.choose(what, None if name == "auto" else name)
        self.screen.say(f"{what}: {name}")

    def _docs(self, _: str) -> None:
        found = self.conversation.get("/documents")
        data, total = found.get("data"), found.get("total")
        documents = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
        for each in documents:
            asked = f"  {each['question']}" if each.get("question") else ""
            self.screen.say(printable(f"{each.get('name')}{asked}"))
        of_all = f" of {total}" if total != len(documents) else ""
        self.screen.say(printable(f"documents listed: {len(documents)}{of_all} ({found.get('side')})"))

    def _source(self, number: str) -> None:
        citations = citations_of(self.conversation.answer)
        if not number.isascii() or not number.isdigit() or not 0 < int(number[:9]) <= len(citations):
            raise PacelineError(f"The last answer has {len(citations)} sources: name one by its number, as /source 1.")
        citation = citations[int(number) - 1]
        self.screen.show_source(int(number), citation)
        self.screen.say(str(citation.get("passage") or "Its text may not leave its side.").strip(), "")
        self.screen.say(printable(str(citation.get("url") or "")))

    def _report(self, _: str) -> None:
        answer = self.conversation.answer
        if not answer.report:
            raise PacelineError("There is no report: ask something first.")
        shown = {**answer.report, "usage": answer.usage}
        shown.pop("timeline", None)  # for people: /how
        self.screen.say(json.dumps(shown, indent=2, ensure_ascii=False))

    def _how(self, _: str) -> None:
        report = self.conversation.answer.report
        if not report.get("timeline"):
            raise PacelineError("There is no timeline: ask a Paceline server something first.")
        for line in timeline_lines(report):
            self.screen.say(printable(line))

    def _save(self, name: str) -> None:
        if not name:
            raise PacelineError("Name a file: /save talk.md")
        file = Path(os.path.expanduser(name))
        messages = self.conversation.messages
        text = json.dumps(messages, indent=2, ensure_ascii=False) if file.suffix == ".json" else _markdown(messages)
        try:
            written = write_private(file, text.encode(), replace=False)
        except OSError as error:
            raise PacelineError(f"{file} cannot be written: {error.strerror}.") from None
        if not written:
            raise PacelineError(f"{file} exists, and is not written over: name another.")
        self.screen.say(f"{len(messages)} messages in {file}")


def _markdown(messages: list[dict[str, str]]) -> str:
    return "\n".join(f"## {message['role'].capitalize()}\n\n{message['content']}\n" for message in messages)


def _own(model: object) -> dict[str, object]:
    """A model's `paceline` object; empty at other servers."""
    found = model.get("paceline") if isinstance(model, dict) else None
    return found if isinstance(found, dict) else {}


def _listed(own: dict[str, object], name: str) -> list[str]:
    found = own.get(name)
    return [str(each) for each in found] if isinstance(found, list) else []


# ---- how an answer was written ---------------------------------------------------------------------------------------
LEVELS = " ▁▂▃▄▅▆▇█"
BINS = 56  # characters of a course
SIDES = ("device", "cloud")
TOLD = {"lost": "was lost", "refused": "refused", "passed_over": "was passed over", "back": "is back"}
WAYS = {"sent": "up from", "received": "down from"}


class Noted(NamedTuple):
    ms: float
    side: str
    kind: str
    of: str
    number: float
    took_ms: float


def timeline_lines(report: Json) -> Iterator[str]:
    """Sums first, then the course of tokens, drafts and bytes of each side."""
    moments = _moments(report.get("timeline"))
    yield f"{report.get('strategy')}: {report.get('why')}"
    compared = [
        f"{each.of} {each.number:.3g}" if each.number else f"{each.of} (to be measured)"
        for each in moments
        if each.kind == "cost_ms"
    ]
    if compared:
        yield f"compared, ms a token: {', '.join(compared)}"
    if chosen := [each.of for each in moments if each.kind == "strategy"][1:]:
        yield f"then by {', '.join(chosen)}"
    yield from _sums(moments)
    for each in moments:
        if each.kind in TOLD:
            yield f"{each.ms:.0f} ms: the {each.side} {TOLD[each.kind]}"
    yield from _energy(report.get("energy"))
    yield from _courses(moments)


def _sums(moments: Sequence[Noted]) -> Iterator[str]:
    def total(kind: str, side: str = "") -> float:
        return sum(each.number for each in moments if each.kind == kind and side in ("", each.side))

    for each in moments:
        if each.kind == "search":
            yield f"{each.side}: {each.number:.0f} passages found in {each.took_ms:.0f} ms"
        elif each.kind == "prefill":
            yield f"{each.side}: {each.number:.0f} tokens of prompts read in {each.took_ms:.0f} ms"
    times = [each.ms for each in moments if each.kind == "tokens"]
    if times:
        rate = (
            f", {1e3 * (total('tokens') - 1) / (max(times) - times[0]):.3g} a second" if max(times) > times[0] else ""
        )
        sides = ", ".join(f"{side} {total('tokens', side):.0f}" for side in SIDES if total("tokens", side))
        yield f"tokens: {total('tokens'):.0f} ({sides}), the first after {times[0]:.0f} ms{rate}"
    for side in SIDES:
        if drafted := total("drafted", side):
            accepted = total("accepted", side)
            kept = f"{accepted:.0f} of {drafted:.0f} accepted ({100 * accepted / drafted:.0f} %)"
            yield f"drafts of the {side}: {kept}, {drafted - accepted:.0f} rolled back"
    if trips := total("round_trips"):
        took = sum(each.took_ms for each in moments if each.kind == "round_trips")
        yield f"round trips: {trips:.0f}, {took / trips:.3g} ms each"
    for way, name in WAYS.items():
        sizes: dict[str, float] = {}
        for each in moments:
            if each.kind == way:
                sizes[each.of] = sizes.get(each.of, 0.0) + each.number
        if sizes:
            side = next(each.side for each in moments if each.kind == way)
            kinds = ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(sizes.items()))
            yield f"bytes {name} the {side}: {sum(sizes.values()):.0f} ({kinds})"


def _energy(energy: object) -> Iterator[str]:
    for side, use in energy.items() if isinstance(energy, dict) else ():
        joules = use.get("joules") if isinstance(use, dict) else None
        if isinstance(joules, int | float):
            yield f"energy of the {side}: {joules:.3g} J"


def _courses(moments: Sequence[Noted]) -> Iterator[str]:
    until = max((each.ms + each.took_ms for each in moments), default=0.0) or 1.0
    for kind, side in product(("tokens", "drafted", "sent", "received"), SIDES):
        bins = [0.0] * BINS
        for each in moments:
            if (each.kind, each.side) == (kind, side):
                bins[min(BINS - 1, int(BINS * each.ms / until))] += each.number
        if most := max(bins):
            course = "".join(LEVELS[0 if not each else max(1, round(8 * each / most))] for each in bins)
            yield f"{f'{side} {kind}':<15} {course}"
    if moments:
        yield f"{'':<15} 0{f'{until:.0f} ms':>{BINS - 1}}"


def _moments(found: object) -> list[Noted]:
    moments = []
    for each in found if isinstance(found, list) else []:
        numbers = [each.get(name, 0.0) for name in ("ms", "number", "took_ms")] if isinstance(each, dict) else []
        if numbers and all(isinstance(number, int | float) and 0 <= number < 1e15 for number in numbers):
            side, kind, of = (str(each.get(name, "")) for name in ("side", "kind", "of"))
            moments.append(Noted(numbers[0], side, kind, of, numbers[1], numbers[2]))
    return moments
