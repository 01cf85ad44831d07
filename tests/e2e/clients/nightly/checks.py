"""What the scripts of this folder share. Imported in environments that have nothing of this project."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = "demo"
EMBEDDER = "all-MiniLM-L6-v2"
QUESTION = "When does the harbour library of Tarnwick open?"
ANSWER = "8:30"
START_S = 240.0  # of a server
PLACES = ["harbour", "library"]  # the arguments of the tool, so few that any model can write one


def opens(text: object) -> None:
    """Assert that a text answers QUESTION."""
    assert isinstance(text, str) and ANSWER in text, text


@contextmanager
def served(
    folder: Path, program: str, *arguments: str, health: str, environment: Mapping[str, str], **more: Any
) -> Iterator[Any]:
    """An `httpx.Client` of a server of this environment, which runs until the end. more: of the client."""
    import httpx  # which not every environment has

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(Path(sys.executable).with_name(program)), *arguments, "--host", "127.0.0.1", "--port", port]
    given = {"PATH": os.defpath, "HOME": str(folder), **environment}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=given, stdout=log, stderr=log, cwd=folder)

    def is_up(client: httpx.Client) -> bool:
        try:
            return client.get(health).status_code == 200
        except httpx.TransportError:
            return False

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0, **more) as client:
            until = time.monotonic() + START_S
            while not is_up(client):
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError((folder / "log").read_text(errors="replace")[-2000:])
                time.sleep(0.5)
            yield client
    finally:
        server.terminate()
        server.wait(30)


def run(package: str, checks: Mapping[str, Callable[[], object]]) -> None:
    """Run each check, and print the version of a package and what went wrong in each, as one line of JSON."""
    found: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
    sys.stdout.write("\n" + json.dumps({"version": version(package), "checks": found}) + "\n")
