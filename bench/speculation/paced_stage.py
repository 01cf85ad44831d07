"""`python -m bench.speculation.paced_stage`: a served stage as a process, which takes a stated time for its forwards.

The stage computes for real and then sleeps until the time is over, so that the cores of one machine do not decide how
fast a pipeline is. What it sends, and what the head tells it, is held back for the time of a hop. Reads its credential
from standard input, and ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from paceline.core.batching.segment import Batch
from paceline.engine.loader import EngineOptions, fingerprint
from paceline.engine.stage import Stage, StageOutput, load_stage, num_layers
from paceline.runtime.stages.links import StageLink
from paceline.runtime.stages.members import READY, StageCredential
from paceline.runtime.stages.stage_server import StageServer
from paceline.wire.effects import Bulk
from paceline.wire.messages import Frame
from paceline.wire.stages.messages import HiddenRows


class PacedStage:
    """A stage whose forwards of any row take `forward_s`, and `row_s` for each row but the first."""

    def __init__(self, inner: Stage, forward_s: float, row_s: float) -> None:
        self._inner, self._forward_s, self._row_s = inner, forward_s, row_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> StageOutput:
        began = time.perf_counter()
        output = self._inner.forward(batch, hidden)
        if rows := output.batch.num_rows:
            wanted = self._forward_s + self._row_s * (rows - 1)
            time.sleep(max(0.0, began + wanted - time.perf_counter()))
        return output


class DelayLine(threading.Thread):
    """Calls what it is given `seconds` later, in order."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="hop", daemon=True)
        self._seconds = seconds
        self._waiting: SimpleQueue[tuple[float, Callable[[], None]]] = SimpleQueue()

    def put(self, act: Callable[[], None]) -> None:
        self._waiting.put((time.perf_counter() + self._seconds, act))

    def run(self) -> None:
        while True:
            due, act = self._waiting.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            act()


class DistantStageServer(StageServer):
    """A stage's process that is a hop away from all others."""

    def __init__(self, *args: Any, hop_s: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._out, self._in = DelayLine(hop_s), DelayLine(hop_s)
        self._out.start()
        self._in.start()

    def to_next(self, header: HiddenRows, payload: bytes) -> None:
        self._out.put(lambda: StageServer.to_next(self, header, payload))

    def to_head(self, message: Frame, payload: bytes = b"") -> None:
        self._out.put(lambda: StageServer.to_head(self, message, payload))

    def _from_head(self, link: StageLink, found: Frame | Bulk) -> None:
        act = partial(StageServer._from_head, self, link, found)

        def pass_on() -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(act)

        self._in.put(pass_on)


async def serve(given: argparse.Namespace) -> None:
    known = msgspec.json.decode(sys.stdin.readline(), type=StageCredential)
    torch.set_num_threads(1)
    options = EngineOptions("paged", kv_mib=64)

    def load(first: int, stop: int) -> Stage:
        inner = load_stage(given.model, first, stop, options=options)
        return cast(Stage, PacedStage(inner, given.forward_s, given.row_s))

    server = DistantStageServer(
        load,
        key=known.key,
        name=known.name,
        head_key=known.head_key,
        model=(fingerprint(given.model), num_layers(given.model)),
        hop_s=given.hop_s,
    )
    first, stop = map(int, given.layers.split(":"))
    server.worker.load(first, stop)
    listening = await server.listen("127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    print(f"{READY}{host}:{port}", flush=True)  # noqa: T201  # read by the bench
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        listening.close()
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", required=True)
    for name in ("--forward-s", "--row-s", "--hop-s"):
        parser.add_argument(name, type=float, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
