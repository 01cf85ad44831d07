"""Files that a request walks through: `python -m lab.walk chat`, `search` or `round`.

chat    from its first function to the first forward of the engine
search  of a workflow, from its first function to the search of this side's documents
round   of `draft_verify`, from one chain of drafts to the next, at both sides of a link, without the engines' loops

Serves the fake model in this process, asks once to warm up and once more with every function's start recorded, on all
threads. Prints the package's files in the order in which they are entered, with the number of calls, and the records
(dataclasses) made on the way. To measure another checkout, put it first in PYTHONPATH and give this file by its path.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import paceline
from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.api.http.server import HttpServer, listen, url_of
from paceline.core.side import SIDES
from paceline.engine.base import LoadedModel
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.identity import PrivateKey, cloud_handshake, device_handshake
from paceline.runtime.link.connection import Link
from paceline.runtime.link.transport import TransportClosed
from paceline.runtime.node import Node
from paceline.runtime.resources import NodeParts
from paceline.runtime.service import AskedPrompt, GenerateRequest, OutputForm
from paceline.strategies.base import Wish
from paceline.strategies.registry import STRATEGIES
from paceline.wire.effects import Claim
from paceline.wire.messages import Introduction

ROOT: Final = Path(paceline.__file__).parents[1]
QUESTION: Final = {"role": "user", "content": "Where does the red boat lie?"}
BODIES: Final[dict[str, dict[str, object]]] = {
    "chat": {"paceline": {"documents": 0}},
    "search": {"paceline": {"workflow": "fast"}},
}
ROUND: Final = "round"
DRAFTS: Final = "paceline/strategies/draft_verify/verifiers", "message"  # where a chain becomes a message
BEFORE: Final = 3  # chains, until the one whose round is recorded
LOOP: Final = ("paceline/runtime/engine_loop/", "paceline/engine/", "paceline/core/batching/")
ENDS: Final = {  # a part of the file, and the function at whose first call the walk ends
    "chat": ("paceline/engine/", "forward"),
    "search": ("paceline/rag/store/documents", "search"),
}


def fake_model() -> LoadedModel:
    """The fake engine, wherever this checkout has it."""
    try:
        from paceline.engine.fake import ByteTokenizer, FakeEngine
    except ImportError:
        from importlib import import_module

        FakeEngine = import_module("paceline.engine.fake.engine").FakeEngine  # type: ignore[misc]  # noqa: N806
        ByteTokenizer = import_module("paceline.engine.fake.tokenizer").ByteTokenizer  # type: ignore[misc]  # noqa: N806
    return LoadedModel(FakeEngine(3, spread=0.3, max_positions=2048), ByteTokenizer())


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """The address of a cloud without a peer, with one document."""
    listener = listen("127.0.0.1", 0)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    servers: list[HttpServer] = []

    async def serve() -> None:
        with DocumentStore.open(directory, HashEmbedder()) as store:
            store.add_text("boats.md", "The red boat lies behind the old mill.", zone="cloud")
            async with Node("cloud", fake_model(), store) as node:
                servers.append(HttpServer(create_app(node, keyring=Keyring({})), ready.set))
                await servers[0].serve([listener])

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait(60)
    try:
        yield url_of(listener)
    finally:
        loop.call_soon_threadsafe(servers[0].stop)
        thread.join(60)


def ask(url: str, kind: str) -> None:
    body = json.dumps({"model": "fake", "messages": [QUESTION], "max_tokens": 4, **BODIES[kind]})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


class Walk:
    """Records functions of the package until the end of the walk."""

    def __init__(self, kind: str) -> None:
        self.files: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self._kind = kind
        self.recording = False  # until the end of the walk
        self._chains = 0
        self._names: dict[CodeType, str | None] = {}

    def _file(self, code: CodeType) -> str | None:
        """Its path below the checkout; None for what is not the package's, and for bodies of modules and classes."""
        if code not in self._names:
            path = Path(code.co_filename)
            ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] == "paceline"
            self._names[code] = path.relative_to(ROOT).as_posix() if ours and code.co_name != "<module>" else None
        return self._names[code]

    def profile_round(self, frame: FrameType, event: str, argument: object) -> None:
        """For `threading.setprofile`."""
        file = self._file(frame.f_code) if event == "call" else None
        if file is not None and file.startswith(DRAFTS[0]) and frame.f_code.co_name == DRAFTS[1]:
            self._chains += 1
            self.recording = self._chains == BEFORE
        if file is None or not file.startswith(LOOP):
            self.profile(frame, event, argument)

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """For `threading.setprofile`."""
        if event != "call" or not self.recording:
            return
        code = frame.f_code
        if code.co_filename == "<string>" and code.co_name == "__init__":  # of a dataclass
            kind = type(frame.f_locals.get("self"))
            if kind.__module__.startswith("paceline."):
                self.records[kind.__qualname__] += 1
            return
        if (file := self._file(code)) is None:
            return
        self.files[file] += 1
        folder, name = ENDS.get(self._kind, ("-", ""))
        if file.startswith(folder) and code.co_name == name:
            self.recording = False


class Pipe:
    """One end of a link's connection in memory."""

    def __init__(self, peer: Pipe | None = None) -> None:
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._peer = peer or Pipe(self)

    @property
    def ends(self) -> tuple[Pipe, Pipe]:
        return self, self._peer

    async def send_bytes(self, data: bytes) -> None:
        self._peer._incoming.put_nowait(data)

    async def recv_bytes(self) -> bytes:
        if (data := await self._incoming.get()) is None:
            raise TransportClosed(1000, "")
        return data

    async def close(self, _code: int, _reason: str) -> None:
        self.abort()

    def abort(self) -> None:
        self._peer._incoming.put_nowait(None)


async def draft_and_verify() -> None:
    """An answer of two linked sides, asked for at the device."""
    keys = {side: PrivateKey(bytes([number] * 32)) for number, side in enumerate(SIDES)}

    async def admit(_claim: Claim) -> bytes:
        return keys["device"].public_key

    sides = {side: Node(side, fake_model(), None, NodeParts()) for side in SIDES}
    known = Introduction("bytes", "0" * 64, "fake", list(STRATEGIES), documents=0, asked_by=None)
    dials = device_handshake(known, device="d", keys=(keys["device"],), server_key=keys["cloud"].public_key)
    left, right = Pipe().ends
    async with sides["cloud"], sides["device"], asyncio.TaskGroup() as tasks:
        device = Link(left, dials, vocab_size=257, on_up=lambda link: sides["device"].on_link(link, "cloud"))
        answers = cloud_handshake(known, keys["cloud"])
        cloud = Link(
            right, answers, authenticate=admit, vocab_size=257, on_up=lambda link: sides["cloud"].on_link(link, "d")
        )
        for link in (device, cloud):
            tasks.create_task(link.run())
            await asyncio.sleep(0)
        await device.up.wait()
        await cloud.up.wait()
        request = GenerateRequest(
            AskedPrompt(messages=(QUESTION,)),
            Wish("draft_verify"),
            OutputForm(max_tokens=60),
        )
        async for _ in (await sides["device"].prepare(request)).run():
            pass
        await device.close()
        await cloud.closed.wait()


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "chat"
    if kind not in (*BODIES, ROUND):
        sys.exit(f"lab.walk: {' or '.join((*BODIES, ROUND))}, not {kind!r}")
    walk = Walk(kind)
    if kind == ROUND:
        threading.setprofile(walk.profile_round)
        thread = threading.Thread(target=lambda: asyncio.run(draft_and_verify()))
        thread.start()
        thread.join()
    else:
        threading.setprofile(walk.profile)  # of threads that start from now on: all but this one
        with tempfile.TemporaryDirectory() as directory, serving(Path(directory)) as url:
            ask(url, kind)
            walk.recording = True
            ask(url, kind)
    for number, (file, calls) in enumerate(walk.files.items(), 1):
        sys.stdout.write(f"{number:3} {calls:6} {file}" + "\n")
    sys.stdout.write("records: " + ", ".join(f"{name} {count}" for name, count in walk.records.items()) + "\n")
    sys.stdout.write(f"{kind}: {len(walk.files)} files, {len(walk.records)} kinds of records" + "\n")


if __name__ == "__main__":
    main()
