"""`paceline demo`: start a server and an agent as two processes, ask three questions, then serve until Ctrl-C.

Uses a temporary directory and the models and documents that ship with the package; needs no network.
`--check` judges the answers and ends: exit code 0 if all are right.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline import models
from paceline.commands.demo import Child, Children, start_pair
from paceline.core.side import Side
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from .conversation import Json
    from .dialogue import Screen

DEVICE = "demo-laptop"
OPTIONS = {"temperature": 0, "max_tokens": 96}
FIRST_TOKEN_S = 20.0  # after which the machine is called slow; the demo pair takes about 1 s
SILENCE_S = 60.0  # without a sign of life, of which a program that is at work sends one every 15 s
WATCH_S = 0.5  # between two checks that both programs are running


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    text: str
    answers: tuple[str, ...]  # each must occur in the answer
    sides: tuple[str, ...]  # sides whose documents are needed


@dataclass(slots=True)
class Told:
    pieces: list[tuple[str, str | None]] = field(default_factory=list)  # (text, lane)
    report: Json = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def citations(self) -> list[tuple[str, str]]:
        """(side, document) of each; a document without a name is private to a device."""
        found = self.report.get("citations")
        return [(each["side"], each["document"]) for each in found] if isinstance(found, list) else []

    def lanes(self) -> Counter[str]:
        return Counter(lane for _, lane in self.pieces if lane)

    def lanes_of(self, part: str) -> frozenset[str]:
        """The sides that decided the pieces which overlap the last occurrence of `part`."""
        start = self.text.casefold().rfind(part.casefold())
        end, position, found = start + len(part), 0, set()
        for text, lane in self.pieces:
            if lane and start >= 0 and position < end and position + len(text) > start:
                found.add(lane)
            position += len(text)
        return frozenset(found)


def load_questions(file: Path) -> tuple[DemoQuestion, ...]:
    """Read the sample questions. Raises ConfigError when the file is missing or malformed."""

    def several(value: str | list[str]) -> tuple[str, ...]:
        return (value,) if isinstance(value, str) else tuple(value)

    try:
        entries = json.loads(file.read_text("utf-8"))
        return tuple(DemoQuestion(each["question"], several(each["answer"]), tuple(each["sides"])) for each in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the sample questions {file} cannot be read ({error}): install paceline again") from error


def faults(question: DemoQuestion, told: Told) -> Iterator[str]:
    """Describe each fault of an answer; nothing if it is right."""
    for expected in question.answers:
        if expected.casefold() not in told.text.casefold():
            yield f"{expected!r} is not in the answer"
        elif strange := told.lanes_of(expected) - set(question.sides):
            yield f"{expected!r} was decided by documents of the {' and '.join(sorted(strange))}"
    cited = {side for side, _ in told.citations}
    for side in question.sides:
        if side not in cited:
            yield f"no document of the {side} is cited"
        if side not in told.lanes():
            yield f"no token was decided by documents of the {side}"
    if told.report.get("degraded"):
        yield f"the answer was degraded: {told.report['degraded']}"


def footer(told: Told) -> str:
    lanes = ", ".join(f"{number} by the {side}" for side, number in sorted(told.lanes().items()))
    cited = "; ".join(f"{side}: {document or 'a private document'}" for side, document in told.citations)
    strategy = told.report.get("strategy", "no report")
    return f"{strategy}; decided: {lanes or 'nothing'}; cited: {cited or 'nothing'}"


def curl_line(url: str, model: str, question: str) -> str:
    body: Mapping[str, object] = {"model": model, "stream": True, "messages": [{"role": "user", "content": question}]}
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"


def demo(
    check: Annotated[bool, typer.Option("--check", help="judge the answers, print PASS or FAIL for each, end")] = False,
    port: Annotated[int, typer.Option("--port", help="the cloud's; another if it is taken")] = 8000,
    agent_port: Annotated[int, typer.Option("--agent-port", help="the device's; another if it is taken")] = 8001,
    keep: Annotated[bool, typer.Option("--keep", help="leave the state directory behind and say where it is")] = False,
    model: Annotated[
        str, typer.Option("--model", help="of both sides, as of serve: smollm, a name, a folder, a GGUF file")
    ] = models.DEMO,
) -> None:
    """Start a server and a device on this machine and let them answer three questions together."""
    from .conversation import Conversation
    from .dialogue import COLOURS, Screen

    screen = Screen()
    questions = load_questions(models.SAMPLES / "questions.json")
    documents: dict[Side, Path] = {"cloud": models.SAMPLES / "public", "device": models.SAMPLES / "private"}
    ports: dict[Side, int] = {"cloud": port, "device": agent_port}
    with _state_directory(screen, keep) as directory, Children(directory) as children:
        screen.say("starting a cloud server and a device agent")
        model = str(Path(model).absolute()) if Path(model).exists() else model  # the programs run in another folder
        pair = start_pair(children, documents, model=model, embedder="minilm", device=DEVICE, ports=ports)
        for side, folder in documents.items():
            names = ", ".join(sorted(file.name for file in folder.iterdir() if file.is_file()))
            screen.say(f"{side:<7} {pair.url(side)}   reads {names}", COLOURS[side])
        # Only the device shows the names of its private documents, so it is asked first; the server must answer alike.
        both = (pair.device, pair.cloud)
        asked = [(child, question) for child in both[: 1 + check] for question in questions]
        wrong = sum(put(screen, child, question, check=check) for child, question in asked)
        if check:
            screen.say(f"\n{len(asked) - wrong} of {len(asked)} answers are right", "")
            raise typer.Exit(1 if wrong else 0)
        with Conversation(pair.cloud.url) as asking:
            name = asking.model
        screen.say("\nAsk more, at either side (OpenAI's API; on this machine no key is needed):", "")
        for child in both:
            screen.say(f"  {curl_line(child.url, name, questions[0].text)}", "")
        screen.say("Ctrl-C ends both.", "")
        with suppress(KeyboardInterrupt):  # the normal end
            while True:
                children.check()
                time.sleep(WATCH_S)


def put(screen: Screen, child: Child, question: DemoQuestion, *, check: bool) -> bool:
    """Ask one question and show the answer as it arrives. True if the request failed or, with `check`, is wrong."""
    from .conversation import REASONING, Conversation, Silent

    screen.say(f"\n{question.text}  (asked at the {child.name})", "bold")
    began, told, first = time.monotonic(), Told(), 0.0
    try:
        with Conversation(child.url, options=OPTIONS, silence=SILENCE_S) as conversation:

            def collected() -> Iterator[tuple[str, str | None]]:
                nonlocal first
                for piece in conversation.ask(question.text):
                    first = first or time.monotonic() - began
                    if piece[1] != REASONING:
                        told.pieces.append(piece)
                    yield piece

            screen.show(collected())
            told.report = conversation.answer.report
    except PacelineError as error:  # a silent program has made no fault: there is no answer to judge
        screen.say(f"{'slow machine' if isinstance(error, Silent) else 'FAIL'}: {error}\n{child.tail()}", "")
        return True
    screen.say(footer(told))
    if first > FIRST_TOKEN_S:
        screen.say(f"slow machine: the first token came after {first:.0f} s")
    wrong = list(faults(question, told)) if check else []
    if check:
        screen.say(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS", "")
    return bool(wrong)


@contextmanager
def _state_directory(screen: Screen, keep: bool) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="paceline-demo-"))
    try:
        yield directory
    finally:
        if keep:
            screen.say(f"state kept in {directory}", "")
        else:
            shutil.rmtree(directory, ignore_errors=True)
