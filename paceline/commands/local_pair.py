"""A server and an agent as two real processes on this machine, linked: for the demonstration, benches and tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.commands.processes import Child, Children, Readiness, command, free_port
from paceline.core.side import SIDES, Side


@dataclass(slots=True)
class Pair:
    """Both programs, ready and linked. Whoever made `children` ends them."""

    cloud: Child
    device: Child
    agent: tuple[str, ...]  # the agent's command without the one-time code: starts it again

    def url(self, side: Side) -> str:
        """Base URL of a side."""
        return self.cloud.url if side == "cloud" else self.device.url


def start_pair(
    children: Children,
    documents: Mapping[Side, Path],
    *,
    model: str,
    embedder: str,
    device: str,
    ports: Mapping[Side, int] | None = None,
    flags: Sequence[str] = (),
    side_flags: Mapping[Side, Sequence[str]] | None = None,
    dialled: Callable[[str], str] = lambda url: url,
) -> Pair:
    """Documents first, then the server, the enrolment, the agent. State is kept below the directory of `children`.

    documents: a file or folder for each side. device: the name it is enrolled under. ports: preferred ones, another is
    taken where one is in use. flags: of both programs, besides what is needed; side_flags: of one. dialled: from the
    server's URL to the one that the agent is told, where something stands between them.
    Raises PacelineError with what a program said last if it does not get ready.
    """
    state = {side: str(children.directory / side) for side in SIDES}
    for side in SIDES:
        where = ("--side", side, "--store", str(store_of(children.directory, side)))
        children.run(command("docs", "add", str(documents[side]), *where, "--embedder", embedder))
    common = ("--model", model, "--embedder", embedder, "--host", "127.0.0.1", *flags)
    only, wanted = side_flags or {}, ports or {}
    port = free_port(wanted.get("cloud", 0))
    serve = command("serve", *common, "--port", str(port), "--state-dir", state["cloud"], *only.get("cloud", ()))
    cloud = children.start("cloud", serve, port=port)
    children.wait(lambda said: all(said))
    code = json.loads(children.run(command("devices", "add", device, "--state-dir", state["cloud"], "--json")))["code"]
    port = free_port(wanted.get("device", 0))
    agent = command("agent", *common, "--port", str(port), "--state-dir", state["device"], *only.get("device", ()))
    agent += ["--cloud", dialled(cloud.url)]
    started = children.start("device", [*agent, "--device", device, "--code", code], port=port)
    children.wait(linked)
    return Pair(cloud, started, tuple(agent))


def store_of(directory: Path, side: Side) -> Path:
    """Where a side's documents are."""
    return directory / side / "docs"


def linked(said: Sequence[Readiness | None]) -> bool:
    """Are all ready, and does each see the other?"""
    return all(each is not None and bool(each.get("linked")) for each in said)
