"""Child processes of the demonstration: each in its own process group, with its output in a file, always ended.

Knows processes, ports and `/readyz`, nothing of what the programs do. Not handled: when this process is killed with
SIGKILL its children keep running.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paceline.errors import PacelineError
from paceline.settings import PREFIX

if TYPE_CHECKING:
    import httpx

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
