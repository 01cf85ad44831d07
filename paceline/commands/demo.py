"""`paceline demo`: start a server and an agent as two processes, ask three questions, then serve until Ctrl-C.

Uses a temporary directory and the models and documents that ship with the package; needs no network.
`--check` judges the answers and ends: exit code 0 if all are right.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, NoReturn, Self

import typer

from paceline import models
from paceline.core.side import SIDES, Side
from paceline.errors import ConfigError, PacelineError
from paceline.secret_files import write_private
from paceline.settings import PREFIX

if TYPE_CHECKING:
    import httpx
    from openai import OpenAI
    from rich.console import Console


# Child processes of the demonstration: each in its own process group, with its output in a file, always ended.
#
# Knows processes, ports and `/readyz`, nothing of what the programs do. Not handled: when this process is killed with
# SIGKILL its children keep running.


START_S = 300.0  # loading both models takes about 5 s on two idle cores; a program that ends is noticed at once
STOP_S = 5.0
POLL_S = 0.1
TAIL = 25  # lines of a program's output that are shown when it fails

Readiness = Mapping[str, object]


def command(*arguments: str) -> list[str]:
    """Command line that runs `paceline` with this interpreter."""
    return [sys.executable, "-m", "paceline", *arguments]


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Environment without the user's own settings and keyring: these must not change the demonstration, nor it them."""
    kept = {key: value for key, value in env.items() if not key.startswith(PREFIX)}
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring"}


def free_port(preferred: int, host: str = "127.0.0.1") -> int:
    """`preferred` if nothing listens there, else any free port."""
    for number in (preferred, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            return int(probe.getsockname()[1])
    raise PacelineError(f"no free port on {host}: end a program that listens there")


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def tail(self) -> str:
        """The last lines of its output."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return "\n".join(f"  {self.name} | {line}" for line in lines[-TAIL:])

    def readiness(self, client: httpx.Client) -> Readiness | None:
        """The body of /readyz; None while the program is not ready."""
        import httpx

        try:
            answer = client.get(f"{self.url}/readyz")
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None


@dataclass(slots=True)
class Children:
    """A context manager that ends all programs started in it."""

    directory: Path  # working directory of the programs, and where their output goes
    members: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, arguments: Sequence[str], *, port: int) -> Child:
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                list(arguments),
                cwd=self.directory,  # no paceline.toml there
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them in order
            )
        child = Child(name, process, log, f"http://127.0.0.1:{port}")
        self.members.append(child)
        return child

    def run(self, arguments: Sequence[str]) -> str:
        """Run a program to its end and return its standard output. Raises PacelineError with its errors if it fails."""
        done = subprocess.run(
            list(arguments),
            cwd=self.directory,
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if done.returncode:
            raise PacelineError(f"`{' '.join(arguments[2:])}` failed: {done.stderr.strip()}")
        return done.stdout

    def wait(self, ready: Callable[[Sequence[Readiness | None]], bool], *, timeout: float = START_S) -> None:
        """Wait until `ready` is true of the bodies of all programs' /readyz.

        Raises PacelineError with the end of their output when one ends before, or time is up.
        """
        import httpx

        deadline = time.monotonic() + timeout
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while not ready([child.readiness(client) for child in self.members]):
                self.check()
                if time.monotonic() > deadline:
                    raise PacelineError(f"not ready after {timeout:.0f} s\n{self._tails(self.members)}")
                time.sleep(POLL_S)

    def check(self) -> None:
        """Raise PacelineError when a program has ended by itself."""
        if ended := [child for child in self.members if child.process.poll() is not None]:
            codes = ", ".join(f"{child.name} ended with code {child.process.returncode}" for child in ended)
            raise PacelineError(f"{codes}\n{self._tails(ended)}")

    def stop(self) -> None:
        """End all programs in reverse order: SIGTERM first, SIGKILL after STOP_S, to their whole process groups.

        Ctrl-C meanwhile kills them at once, and is raised afterwards.
        """
        try:
            self._end(STOP_S)
        except KeyboardInterrupt:
            self._end(0.0)
            raise

    def _end(self, patience_s: float) -> None:
        running = [child for child in reversed(self.members) if child.process.poll() is None]
        for child in running:
            _signal(child.process, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        for child in running:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in self.members:
            _signal(child.process, signal.SIGKILL)  # to the group, which may outlive the program
            child.process.wait()

    @staticmethod
    def _tails(children: Sequence[Child]) -> str:
        return "\n".join(child.tail() for child in children)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the process group, whose id is that of the process since it leads its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


# A linked server and agent as two real processes on this machine, for the demonstration, benches and tests.


@dataclass(slots=True)
class Pair:
    """Both programs, ready and linked. The owner of their `Children` ends them."""

    cloud: Child
    device: Child
    agent: tuple[str, ...]  # the agent's command without the one-time code, for a restart

    def url(self, side: Side) -> str:
        """The base URL of a side."""
        return self.cloud.url if side == "cloud" else self.device.url


def start_pair(
    children: Children,
    documents: Mapping[Side, Path],
    *,
    model: str | Mapping[Side, str],
    embedder: str | Mapping[Side, str],
    device: str,
    ports: Mapping[Side, int] | None = None,
    flags: Sequence[str] = (),
    side_flags: Mapping[Side, Sequence[str]] | None = None,
    dialled: Callable[[str], str] = lambda url: url,
) -> Pair:
    """Add the documents, start the server, enrol the device, start the agent, and wait until they are linked.

    Clients of the server may ask the device, as often as they like: both belong to who starts them.

    State is kept below the directory of `children`. documents: a file or folder for each side. device: the name it is
    enrolled under. ports: preferred ones; one in use is replaced by a free one. flags: additional flags of both
    programs; side_flags: of one. dialled: maps the server's URL to the one that the agent dials, for a proxy between.
    Raises PacelineError with the end of a program's output if it does not get ready.
    """
    state = {side: str(children.directory / side) for side in SIDES}
    embedders = dict.fromkeys(SIDES, embedder) if isinstance(embedder, str) else embedder
    models = dict.fromkeys(SIDES, model) if isinstance(model, str) else model
    for side in SIDES:
        where = ("--side", side, "--store", str(store_of(children.directory, side)))
        children.run(command("docs", "add", str(documents[side]), *where, "--embedder", embedders[side]))
    own = {side: ("--model", models[side], "--embedder", embedders[side], "--state-dir", state[side]) for side in SIDES}
    common = ("--host", "127.0.0.1", *flags)
    only, preferred = side_flags or {}, ports or {}
    port = free_port(preferred.get("cloud", 0))
    serve = command("serve", *common, *own["cloud"], "--port", str(port), *only.get("cloud", ()))
    cloud = children.start("cloud", serve, port=port)
    children.wait(lambda reports: all(reports))
    code = json.loads(children.run(command("devices", "add", device, "--state-dir", state["cloud"], "--json")))["code"]
    port = free_port(preferred.get("device", 0))
    asked = ("--cloud-may-ask", "on", "--cloud-asks-per-minute", "0", "--cloud-asks-per-hour", "0")
    agent = command("agent", *common, *own["device"], "--port", str(port), *asked)
    agent += only.get("device", ())
    agent += ["--cloud", dialled(cloud.url)]
    code_file = children.directory / "code"
    write_private(code_file, code.encode())
    started = children.start("device", [*agent, "--device", device, "--code-file", str(code_file)], port=port)
    children.wait(linked)
    return Pair(cloud, started, tuple(agent))


def configured(folder: Path, *lines: str) -> tuple[str, str]:
    """Flags that name a file with these settings, for a program to start: lines of TOML, as `tuning.threads = 1`."""
    descriptor, name = tempfile.mkstemp(".toml", dir=folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return "--config", name


def store_of(directory: Path, side: Side) -> Path:
    """The folder of a side's document store."""
    return directory / side / "docs"


def linked(reports: Sequence[Readiness | None]) -> bool:
    """True if all programs are ready and report a link."""
    return all(each is not None and bool(each.get("linked")) for each in reports)


# The demonstration's questions: sent with OpenAI's own client, shown as the answer arrives, and judged.
#
# Colours show which side's documents decided each token, from the `paceline` object of each chunk. Knows nothing of
# processes or ports: it gets a base URL.


MAX_TOKENS = 96
COLOURS = {"cloud": "cyan", "device": "magenta"}  # by lane; text without a lane has the terminal's colour


class Silent(PacelineError):
    """Nothing came for longer than the client waits, no sign that the program is at work either."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]  # each must occur in the answer
    sides: tuple[str, ...]  # sides whose documents are needed


@dataclass(slots=True)
class Answer:
    """A streamed answer, collected."""

    pieces: list[tuple[str, str | None]] = field(default_factory=list)  # (text, lane)
    citations: list[tuple[str, str]] = field(default_factory=list)  # (side, document)
    strategy: str = ""
    degraded: str | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def lanes(self) -> Counter[str]:
        """Pieces by the side whose documents decided them."""
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


def load_questions(file: Path) -> tuple[Question, ...]:
    """Read the sample questions. Raises ConfigError when the file is missing or malformed."""
    try:
        entries = json.loads(file.read_text("utf-8"))
        return tuple(Question(each["question"], _several(each["answer"]), tuple(each["sides"])) for each in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the sample questions {file} cannot be read ({error}): install paceline again") from error


def ask(client: OpenAI, question: str, show: Callable[[str, str | None], None]) -> Answer:
    """Send one streamed request at temperature 0. `show` gets each piece of text with its lane as it arrives.

    Raises PacelineError when the request fails, before or after its first token; Silent where that is the client's
    timeout, which every sign of life begins anew.
    """
    from openai import APITimeoutError, OpenAIError

    try:
        return _asked(client, question, show)
    except APITimeoutError as error:
        raise Silent(f"nothing came from {client.base_url} for {client.timeout} s") from error
    except OpenAIError as error:
        raise PacelineError(f"the request to {client.base_url} failed: {error}") from error


def _asked(client: OpenAI, question: str, show: Callable[[str, str | None], None]) -> Answer:
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"paceline": {"report": True}},
    )
    answer = Answer()
    for chunk in stream:
        report = (chunk.model_extra or {}).get("paceline") or {}
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            answer.pieces.append((text, report.get("lane")))
            show(text, report.get("lane"))
        if "citations" in report:
            answer.citations = [(each["side"], each["document"]) for each in report["citations"]]
            answer.strategy, answer.degraded = report["strategy"], report["degraded"]
    return answer


def faults(question: Question, answer: Answer) -> Iterator[str]:
    """Describe each fault of an answer; nothing if it is right."""
    for expected in question.answers:
        if expected.casefold() not in answer.text.casefold():
            yield f"{expected!r} is not in the answer"
        elif strange := answer.lanes_of(expected) - set(question.sides):
            yield f"{expected!r} was decided by documents of the {' and '.join(sorted(strange))}"
    cited = {side for side, _ in answer.citations}
    for side in question.sides:
        if side not in cited:
            yield f"no document of the {side} is cited"
        if side not in answer.lanes():
            yield f"no token was decided by documents of the {side}"
    if answer.degraded:
        yield f"the answer was degraded: {answer.degraded}"


def _several(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def footer(answer: Answer) -> str:
    """Strategy, pieces by lane and citations in one line. A document without a name is private to a device."""
    lanes = ", ".join(f"{number} by the {side}" for side, number in sorted(answer.lanes().items()))
    cited = "; ".join(f"{side}: {document or 'a private document'}" for side, document in answer.citations)
    return f"{answer.strategy or 'no report'}; decided: {lanes or 'nothing'}; cited: {cited or 'nothing'}"


def curl_line(url: str, model: str, question: str) -> str:
    body: Mapping[str, object] = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": question}],
    }
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"


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
