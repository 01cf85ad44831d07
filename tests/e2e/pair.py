"""A linked server and agent as two real processes, each with its own documents; and a server alone, with commands."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from paceline.commands import demo as commands
from paceline.commands.demo import Child, Children, command, free_port, linked, start_pair
from paceline.strategies.base import Side
from tests.e2e.turnstile import Turnstile, turnstile

DOCUMENTS: Mapping[Side, str] = {
    "cloud": "The harbour library of Tarnwick opens at eight in the morning.\n",
    "device": "My landlord is called Velda, and the harbour library has kept a book for me.\n",
}
QUESTION = "When does the harbour library open, and who is my landlord?"
DEVICE = "laptop"


@dataclass(slots=True)
class Pair:
    """The pair, with methods to kill and restart its agent."""

    children: Children
    started: commands.Pair
    directory: Path
    turnstile: Turnstile | None = None  # proxy between the two

    def url(self, side: Side) -> str:
        return self.started.url(side)

    def client(self, side: Side) -> OpenAI:
        return OpenAI(base_url=f"{self.url(side)}/v1", api_key="none", max_retries=0, timeout=60.0)

    def kill_agent(self) -> None:
        """Kill with SIGKILL, as in a crash or a power cut."""
        device = self.started.device
        os.kill(device.process.pid, signal.SIGKILL)
        device.process.wait()
        self.children.members.remove(device)

    def restart_agent(self) -> None:
        port = int(self.started.device.url.rsplit(":", 1)[1])
        self.started.device = self.children.start("device", self.started.agent, port=port)
        self.children.wait(linked)


@contextmanager
def running_pair(
    directory: Path,
    *,
    model: str | Mapping[Side, str] = "fake",
    documents: Mapping[Side, str | Path] = DOCUMENTS,
    flags: tuple[str, ...] = (),
    agent_flags: tuple[str, ...] = (),
    cloud_flags: tuple[str, ...] = (),
    embedder: str | Mapping[Side, str] = "hash",
    stoppable: bool = False,
) -> Iterator[Pair]:
    """Both programs, ready and linked, and ended in every case.

    documents: of each side a text, or a file or folder. stoppable: with a turnstile between them.
    """
    files: dict[Side, Path] = {}
    for side, given in documents.items():
        files[side] = given if isinstance(given, Path) else directory / f"{side}.md"
        if isinstance(given, str):
            files[side].write_text(given)
    with Children(directory) as children, ExitStack() as between:
        proxies: list[Turnstile] = []

        def dialled(url: str) -> str:
            if stoppable:
                proxies.append(between.enter_context(turnstile(url)))
            return proxies[-1].url if proxies else url

        started = start_pair(
            children,
            files,
            model=model,
            embedder=embedder,
            device=DEVICE,
            flags=("--debug-options", *flags),
            side_flags={"device": agent_flags, "cloud": cloud_flags},
            dialled=dialled,
        )
        yield Pair(children, started, directory, proxies[-1] if proxies else None)


def started(
    children: Children, name: str, program: str, *flags: str, state: Path | None = None, port: int = 0
) -> Child:
    """`paceline serve` or `agent`, ready: with the fake model on a free port, unless flags or `port` say otherwise."""
    port = free_port(port)
    model = () if "--model" in flags else ("--model", "fake")
    where = ("--port", str(port), "--state-dir", str(state or children.directory / name))
    child = children.start(name, command(program, *model, *where, *flags), port=port)
    children.wait(all)
    return child


def joined(
    children: Children, name: str, cloud: str, *flags: str, state: Path | None = None, of: tuple[str, ...] = ()
) -> Child:
    """`paceline agent`, linked, with a code of its server's. of: flags of the command that makes the code."""
    code = children.directory / f"{name}.code"
    code.touch(mode=0o600)
    code.write_text(children.run(command("devices", "add", name, *of)))
    given = ("--cloud", cloud, "--device", name, "--code-file", str(code))
    child = started(children, name, "agent", *given, *flags, state=state)
    children.wait(lambda said: all(said) and said[-1] is not None and bool(said[-1]["linked"]))
    return child


class Server:
    """`paceline serve`, or `agent`, with its own documents, and the commands and requests of its users."""

    def __init__(self, children: Children, directory: Path, program: str = "serve") -> None:
        self._children = children
        self._program = program
        self.side = "cloud" if program == "serve" else "device"
        self.state = directory / "state"
        self.child: Child
        self._port = 0
        self.start()

    def start(self) -> None:
        self.child = started(self._children, self.side, self._program, state=self.state, port=self._port)
        self._port = int(self.child.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        os.kill(self.child.process.pid, signal.SIGKILL)
        self.child.process.wait()
        self._children.members.remove(self.child)

    def run(self, *arguments: str) -> str:
        return self._children.run(command(*arguments, "--state-dir", str(self.state)))

    def docs(self, *arguments: str) -> str:
        flags = ("--side", self.side, "--state-dir", str(self.state), "--embedder", "hash")
        return self._children.run(command("docs", *arguments, *flags))

    def make_key(self, name: str) -> str:
        made: str = json.loads(self.run("keys", "create", name, "--json"))["key"]
        return made

    def call(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.child.url}{path}", headers=headers, timeout=60.0, trust_env=False, **more)

    def upload(self, name: str) -> str:
        answer = self.call("POST", "/v1/files", files={"file": (name, name * 20)}, data={"purpose": "assistants"})
        assert answer.status_code == 200, answer.text
        made: str = answer.json()["id"]
        return made
