"""A linked server and agent as two real processes on this machine, for the demonstration, benches and tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.commands.processes import Child, Children, Readiness, command, free_port
from paceline.core.side import SIDES, Side
from paceline.secret_files import write_private


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


def store_of(directory: Path, side: Side) -> Path:
    """The folder of a side's document store."""
    return directory / side / "docs"


def linked(reports: Sequence[Readiness | None]) -> bool:
    """True if all programs are ready and report a link."""
    return all(each is not None and bool(each.get("linked")) for each in reports)
