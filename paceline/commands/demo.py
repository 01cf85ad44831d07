"""`paceline demo`: start a server and an agent as two processes, ask three questions, then serve until Ctrl-C.

Uses a temporary directory and the models and documents that ship with the package; needs no network.
`--check` judges the answers and ends: exit code 0 if all are right.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from paceline import models
from paceline.commands.demonstration.local_pair import Pair, start_pair
from paceline.commands.demonstration.questions import (
    COLOURS,
    Question,
    Silent,
    ask,
    curl_line,
    faults,
    footer,
    load_questions,
)
from paceline.commands.processes import Child, Children
from paceline.core.side import Side
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from openai import OpenAI
    from rich.console import Console

DEVICE = "demo-laptop"
MODEL = "demo"
FIRST_TOKEN_S = 20.0  # after which the machine is called slow; the demo pair takes about 1 s
SILENCE_S = 60.0  # without a sign of life, of which a program that is at work sends one every 15 s
ANSWER_S = 600.0  # for a whole answer
WATCH_S = 0.5  # between two checks that both programs are running


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: paceline demo --check")(demo)


def demo(
    check: Annotated[bool, typer.Option("--check", help="judge the answers, print PASS or FAIL for each, end")] = False,
    port: Annotated[int, typer.Option("--port", help="the cloud's; another if it is taken")] = 8000,
    agent_port: Annotated[int, typer.Option("--agent-port", help="the device's; another if it is taken")] = 8001,
    keep: Annotated[bool, typer.Option("--keep", help="leave the state directory behind and say where it is")] = False,
) -> None:
    """Start a server and a device on this machine and let them answer three questions together."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    questions = load_questions(models.SAMPLES / "questions.json")
    with _ended_by_signals(), _state_directory(console, keep) as directory, Children(directory) as children:
        with console.status("starting a cloud server and a device agent"):
            pair = _start(children, port, agent_port)
            cloud, device = pair.cloud, pair.device
        console.print(f"cloud   {cloud.url}   reads {_names('public')}", style=COLOURS["cloud"])
        console.print(f"device  {device.url}   reads {_names('private')}", style=COLOURS["device"])
        # Only the device shows the names of its private documents, so it is asked first; the server must answer alike.
        asked = [(child, question) for child in ((device, cloud) if check else (device,)) for question in questions]
        wrong = sum(_put(console, child, question, check=check) for child, question in asked)
        if check:
            console.print(f"\n{len(asked) - wrong} of {len(asked)} answers are right")
            raise typer.Exit(1 if wrong else 0)
        console.print("\nAsk more, at either side (OpenAI's API; on this machine no key is needed):")
        for child in (device, cloud):
            console.print(f"  {curl_line(child.url, MODEL, questions[0].text)}", markup=False)
        console.print("Ctrl-C ends both.")
        _serve(children)


def _start(children: Children, port: int, agent_port: int) -> Pair:
    from paceline.rag.embedder import DEFAULT

    documents: dict[Side, Path] = {"cloud": models.SAMPLES / "public", "device": models.SAMPLES / "private"}
    ports: dict[Side, int] = {"cloud": port, "device": agent_port}
    return start_pair(children, documents, model=MODEL, embedder=DEFAULT, device=DEVICE, ports=ports)


def _put(console: Console, child: Child, question: Question, *, check: bool) -> bool:
    """Ask one question and show the answer as it arrives. True if the request failed or, with `check`, is wrong."""
    console.print(f"\n{question.text}  (asked at the {child.name})", style="bold", markup=False)
    began, first = time.monotonic(), 0.0

    def show(text: str, lane: str | None) -> None:
        nonlocal first
        first = first or time.monotonic() - began
        console.print(text, end="", style=COLOURS.get(lane or "", ""), markup=False)

    try:
        with _within(ANSWER_S):
            answer = ask(_client(child.url), question.text, show)
    except Silent as error:  # no fault of an answer: there is none to judge
        console.print(f"\nslow machine: {error}\n{child.tail()}", markup=False)
        return True
    except PacelineError as error:
        console.print(f"\nFAIL: {error}\n{child.tail()}", markup=False)
        return True
    console.print(f"\n{footer(answer)}", style="dim", markup=False)
    if first > FIRST_TOKEN_S:
        console.print(f"slow machine: the first token came after {first:.0f} s", style="dim", markup=False)
    wrong = list(faults(question, answer)) if check else []
    if check:
        console.print("PASS" if not wrong else f"FAIL: {'; '.join(wrong)}", markup=False)
    return bool(wrong)


def _client(url: str) -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="not needed on loopback", timeout=SILENCE_S, max_retries=0)


def _names(folder: str) -> str:
    return ", ".join(sorted(file.name for file in (models.SAMPLES / folder).iterdir() if file.is_file()))


def _serve(children: Children) -> None:
    """Wait for Ctrl-C, the normal end. Raises PacelineError when a program ends by itself."""
    with suppress(KeyboardInterrupt):
        while True:
            children.check()
            time.sleep(WATCH_S)


@contextmanager
def _state_directory(console: Console, keep: bool) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="paceline-demo-"))
    try:
        yield directory
    finally:
        if keep:
            console.print(f"state kept in {directory}", markup=False)
        else:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the demonstration as Ctrl-C does, so that nothing is left running."""

    def end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  # a signal handler's signature
        raise typer.Exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise Silent when time is up. A read timeout does not suffice: keep-alive comments restart it."""

    def end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  # a signal handler's signature
        raise Silent(f"no whole answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
