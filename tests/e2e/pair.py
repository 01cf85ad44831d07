"""A server and an agent as two real processes, linked, each with its own documents."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

from paceline.commands.children import Child, Children, command, free_port
from paceline.commands.demo import linked
from paceline.strategies.machine import SIDES, Side

DOCUMENTS: Mapping[Side, str] = {
    "cloud": "The harbour library of Tarnwick opens at eight in the morning.\n",
    "device": "My landlord is called Velda, and the harbour library has kept a book for me.\n",
}
QUESTION = "When does the harbour library open, and who is my landlord?"
DEVICE = "laptop"


@dataclass(slots=True)
class Pair:
    children: Children
    cloud: Child
    device: Child
    directory: Path
    agent: list[str]  # its command, to start it again without the one-time code

    def url(self, side: Side) -> str:
        return (self.cloud if side == "cloud" else self.device).url

    def client(self, side: Side) -> OpenAI:
        return OpenAI(base_url=f"{self.url(side)}/v1", api_key="none", max_retries=0, timeout=60.0)

    def kill_agent(self) -> None:
        """kill -9, as a crash or a power cut would."""
        os.kill(self.device.process.pid, signal.SIGKILL)
        self.device.process.wait()
        self.children.members.remove(self.device)

    def restart_agent(self) -> None:
        port = int(self.device.url.rsplit(":", 1)[1])
        self.device = self.children.start("device", self.agent, port=port)
        self.children.wait(linked)


def store_of(directory: Path, side: Side) -> Path:
    return directory / side / "docs"


@contextmanager
def running_pair(
    directory: Path,
    *,
    model: str = "fake",
    documents: Mapping[Side, str] = DOCUMENTS,
    agent_flags: tuple[str, ...] = (),
) -> Iterator[Pair]:
    """Both programs ready and linked; whatever happens, neither is left behind."""
    with Children(directory) as children:
        for side in SIDES:
            file = directory / f"{side}.md"
            file.write_text(documents[side])
            flags = ("--side", side, "--store", str(store_of(directory, side)), "--embedder", "hash")
            children.run(command("docs", "add", str(file), *flags))
        common = ("--model", model, "--embedder", "hash", "--threads", "1")
        state = str(directory / "cloud")
        port = free_port(0)
        serve = command("serve", *common, "--port", str(port), "--state-dir", state)
        cloud = children.start("cloud", serve, port=port)
        children.wait(lambda said: all(said))
        code = json.loads(children.run(command("devices", "add", DEVICE, "--state-dir", state, "--json")))["code"]
        port = free_port(0)
        agent = command("agent", *common, "--port", str(port), "--state-dir", str(directory / "device"))
        agent += ["--cloud", cloud.url, *agent_flags]
        device = children.start("device", [*agent, "--device", DEVICE, "--code", code], port=port)
        children.wait(linked)
        yield Pair(children, cloud, device, directory, agent)
