"""A linked server and agent as two real processes on this machine, for the demonstration, benches and tests.

Each program in its own process group, with its output in a file, always ended. Knows processes, ports and `/readyz`,
nothing of what the programs do. Not handled: when this process is killed with SIGKILL its children keep running.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from paceline.core.side import SIDES, Side
from paceline.errors import PacelineError
from paceline.secret_files import write_private
from paceline.settings import PREFIX
from paceline.system import signal_group

if TYPE_CHECKING:
    import httpx


START_S = 300.0  # loading both models takes about 5 s on two idle cores; a program that ends is noticed at once
STOP_S = 5.0
POLL_S = 0.1
ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # of this process alone
TAIL = 25  # lines of a program's output that are shown when it fails

Readiness = Mapping[str, object]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *arguments]


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Environment without the user's own settings and keyring: these must not change the demonstration, nor it them."""
    kept = {key: value for key, value in env.items() if not key.startswith(PREFIX)}
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring"}


def free_port(preferred: int) -> int:
    """`preferred` if nothing listens there, else any free port."""
    for number in (preferred, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", number))
            return int(probe.getsockname()[1])
    raise PacelineError("no free port on 127.0.0.1: end a program that listens there")


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def tail(self) -> str:
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


def _exit(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@dataclass(slots=True)
class Children:
    """A context manager that ends all programs started in it."""

    directory: Path  # working directory of the programs, and where their output goes
    members: list[Child] = field(default_factory=list)
    _handled: list[int] = field(default_factory=list)  # signals that are, here, meanwhile

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handled = [each for each in ENDINGS if signal.getsignal(each) is signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, _exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            for number in self._handled:
                signal.signal(number, signal.SIG_DFL)

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
            signal_group(child.process, kill=False)
        deadline = time.monotonic() + patience_s
        for child in running:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in self.members:
            signal_group(child.process, kill=True)  # to the group, which may outlive the program
            child.process.wait()

    @staticmethod
    def _tails(children: Sequence[Child]) -> str:
        return "\n".join(child.tail() for child in children)


@dataclass(slots=True)
class Pair:
    """Both programs, ready and linked. The owner of their `Children` ends them."""

    cloud: Child
    device: Child
    agent: tuple[str, ...]  # the agent's command without the one-time code, for a restart

    def url(self, side: Side) -> str:
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
    return directory / side / "docs"


def linked(reports: Sequence[Readiness | None]) -> bool:
    """True if all programs are ready and report a link."""
    return all(each is not None and bool(each.get("linked")) for each in reports)
