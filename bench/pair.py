"""A server and an agent as two real processes on this machine, linked, for benches whose claim is about the link."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.commands.children import Children, command, free_port
from paceline.commands.demo import linked
from paceline.core.sides import SIDES, Side

DOCUMENTS: Mapping[Side, str] = {
    "cloud": "The harbour library of Tarnwick opens at eight.\n",
    "device": "The harbour library of Tarnwick lends me books.\n",
}
DEVICE = "laptop"


@dataclass(frozen=True, slots=True)
class Pair:
    """Base URLs of both programs."""

    cloud: str
    device: str

    def url(self, side: Side) -> str:
        return self.cloud if side == "cloud" else self.device


@contextmanager
def linked_pair(directory: Path, *, model: str, emulate: Mapping[Side, str]) -> Iterator[Pair]:
    """Both ready and linked. emulate: `--emulate` of each side; what is said of the link belongs to the device."""
    with Children(directory) as children:
        for side in SIDES:
            file = directory / f"{side}.md"
            file.write_text(DOCUMENTS[side])
            flags = ("--side", side, "--store", str(directory / side / "docs"), "--embedder", "hash")
            children.run(command("docs", "add", str(file), *flags))
        common = ("--model", model, "--embedder", "hash", "--threads", "1")
        state, port = str(directory / "cloud"), free_port(0)
        serve = command("serve", *common, "--port", str(port), "--state-dir", state)
        cloud = children.start("cloud", [*serve, *_emulated(emulate, "cloud")], port=port)
        children.wait(lambda said: all(said))
        code = json.loads(children.run(command("devices", "add", DEVICE, "--state-dir", state, "--json")))["code"]
        port = free_port(0)
        agent = command("agent", *common, "--port", str(port), "--state-dir", str(directory / "device"))
        agent += ["--cloud", cloud.url, "--device", DEVICE, "--code", code, *_emulated(emulate, "device")]
        device = children.start("device", agent, port=port)
        children.wait(linked)
        yield Pair(cloud.url, device.url)


def _emulated(emulate: Mapping[Side, str], side: Side) -> list[str]:
    return ["--emulate", emulate[side]] if emulate.get(side) else []
