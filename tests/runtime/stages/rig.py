"""Stages on threads of this process, and in processes, with their head: real connections, keys made for one test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import paceline.models
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import NO_DEFAULTS
from paceline.engine.loader import EngineOptions, fingerprint
from paceline.engine.stage import load_stage, num_layers
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link.connection import Authenticator
from paceline.runtime.stages.members import Members, Place, Standing
from paceline.runtime.stages.pipeline import RemotePipeline
from paceline.runtime.stages.stage_server import StageServer
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim

Span = tuple[int, int]
DEMO = Path(paceline.models.__file__).parent / "device"  # of six layers
FLOAT32 = EngineOptions(dtype="float32")


def chain(seq: int, start: int, tokens: tuple[int, ...]) -> Batch:
    return Batch((Segment(SeqId(seq), start, tokens, logits="all"),))


@dataclass
class Stage:
    """A stage of this process, on a loop of its own."""

    directory: Path
    span: Span | None
    head_key: bytes
    options: EngineOptions
    port: int = 0
    key: PrivateKey = field(default_factory=PrivateKey.generate)
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or f"stage {self.span}"
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(120)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _live(self, ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        load = partial(load_stage, self.directory, options=self.options)
        self.server = StageServer(
            load,
            key=self.key,
            name=self.name,
            head_key=self.head_key,
            model=(fingerprint(self.directory), num_layers(self.directory)),
        )
        if self.span is not None:
            self.server.worker.load(*self.span)
        listening = await self.server.listen("127.0.0.1", self.port)
        self.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await self._end.wait()
        listening.close()
        self.server.close()
        await asyncio.to_thread(self.server.worker.join)
        await asyncio.sleep(0)

    def break_off(self) -> None:
        """As when the process dies: every connection is cut, nothing listens any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()


def known_keys(keys: dict[str, bytes]) -> Authenticator:
    async def admit(claim: Claim) -> bytes | CloseCode:
        key = keys.get(claim.device)
        return key if key is not None and claim.proves(key) else CloseCode.BAD_CREDENTIAL

    return admit


@dataclass
class Rig:
    head: PrivateKey
    stages: list[Stage]
    pipeline: RemotePipeline
    keys: dict[str, bytes]

    def begin_again(self, lost: Stage, span: Span | None, options: EngineOptions) -> None:
        """Start a stage with the key and the address of one that was lost."""
        key, more = self.head.public_key, {"port": lost.port, "key": lost.key, "name": lost.name}
        self.stages.append(Stage(lost.directory, span, key, options, **more))  # type: ignore[arg-type]  # by name


def open_pipeline(
    directory: Path,
    places: Sequence[Place],
    head: PrivateKey,
    keys: dict[str, bytes],
    standing: Standing | None = None,
) -> RemotePipeline:
    make = partial(
        Members,
        places,
        key=head,
        admit=known_keys(keys),
        fingerprint=fingerprint(directory),
        format=None,
        standing=standing,
    )
    return RemotePipeline(make, directory.name, NO_DEFAULTS)


def even_spans(layers: int, count: int) -> list[Span]:
    cuts = [layers * number // count for number in range(count + 1)]
    return list(pairwise(cuts))


@contextmanager
def standing(
    spans: Sequence[Span | None], head_key: bytes, options: EngineOptions = FLOAT32, directory: Path = DEMO
) -> Iterator[list[Stage]]:
    stages = [Stage(directory, span, head_key, options, name=f"s{i}") for i, span in enumerate(spans)]
    try:
        yield stages
    finally:
        for stage in stages:
            stage.break_off()


@contextmanager
def rig(
    directory: Path, spans: Sequence[Span], *, options: EngineOptions = FLOAT32, spares: Sequence[Span | None] = ()
) -> Iterator[Rig]:
    head = PrivateKey.generate()
    with standing((*spans, *spares), head.public_key, options, directory) as stages:
        keys = {stage.name: stage.key.public_key for stage in stages}
        pipeline = open_pipeline(directory, [Place(stage.address) for stage in stages], head, keys)
        try:
            yield Rig(head, stages, pipeline, keys)
        finally:
            pipeline.close()
