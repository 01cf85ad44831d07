"""Two sides on this machine: the device in this process, with a random model of a given shape, the cloud in another.

For benches of the time to the first token: nodes, searches and the link are the program's own. The device's forwards
are computed, by a thread pinned to one core. The cloud's forwards, which another machine would compute, only wait:
computation on cores that share execution units or caches with the device's would slow the device down. Baselines use a
second connection to the cloud. Both connections are sockets behind an emulated network, run by the cloud's process so
that it takes no CPU time of the device's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lab.engines import Arbitrary, WrappedEngine
from paceline.core.batching.segment import Batch
from paceline.core.side import SIDES, Side
from paceline.engine.base import Engine, LoadedModel, ModelInfo, Output, delay_forwards
from paceline.engine.fake import FakeEngine
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import EngineError
from paceline.models import DEVICE
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import HashEmbedder
from paceline.rag.prompt import passages_text, relevance
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.identity import PrivateKey, cloud_handshake, device_handshake
from paceline.runtime.link.connection import Link
from paceline.runtime.link.emulation import Emulation, emulated
from paceline.runtime.link.transport import Transport, TransportClosed
from paceline.runtime.node import Node
from paceline.runtime.resources import Kept, NodeParts
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Introduction

POSITIONS = 2048
GRACE_S = 10.0  # for the cloud's process to exit by itself
_KEYS: dict[Side, PrivateKey] = {"cloud": PrivateKey(bytes(32)), "device": PrivateKey(bytes([1] * 32))}  # not secret
_LOGIT_SCALE = 8.0  # random logits are almost even; scaled, they are about as uneven as a trained model's
_LINK, _LINE = b"link", b"line"  # first message of a connection: the program's link, or the baselines' line


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama model."""

    layers: int = 16
    hidden: int = 768
    inner: int = 2048
    heads: int = 12
    kv_heads: int = 12

    @property
    def summary(self) -> str:
        millions = self.layers * (2 * self.hidden * (self.hidden + self._kv) + 3 * self.hidden * self.inner) / 1e6
        return f"{self.layers} layers of {millions:.0f} million weights, hidden {self.hidden}, {self.kv_heads} KV heads"

    @property
    def row_bytes(self) -> int:
        """KV of one token in bfloat16."""
        return 2 * 2 * self.layers * self._kv

    @property
    def _kv(self) -> int:
        return self.kv_heads * (self.hidden // self.heads)


@dataclass(frozen=True, slots=True)
class EmulatedForward:
    """Duration of a forward on an emulated machine."""

    forward_s: float = 0.006
    row_s: float = 0.0003  # each further row

    @property
    def summary(self) -> str:
        return f"{1e3 * self.forward_s:g} ms, and {1e3 * self.row_s:g} for each further row"

    def engine(self, vocab_size: int) -> Engine:
        """Engine with arbitrary distributions that sleeps during a forward, using no core of this machine."""
        return delay_forwards(Arbitrary(FakeEngine(vocab_size=vocab_size)), self.forward_s, self.row_s)


class PinnedEngine(WrappedEngine):
    """`inner` with its thread pinned to one core, where the system supports it."""

    def __init__(self, inner: Engine, core: int) -> None:
        super().__init__(inner)
        self._core: int | None = core

    def forward(self, batch: Batch) -> Output:
        if self._core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self._core})
            self._core = None
        return super().forward(batch)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def random_engine(shape: Shape, vocab_size: int, name: str) -> Engine:
    """Engine with random weights in bfloat16. Raises EngineError if `paged` does not support it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        model.model.norm.weight.mul_(_LOGIT_SCALE)
    model.train(False)
    model.requires_grad_(False)
    info = ModelInfo(name, name, vocab_size, POSITIONS, "bfloat16", "paged")
    engine = paged_engine(model, info, kv_rows=2 * POSITIONS)
    if not isinstance(engine, PagedEngine):
        raise EngineError(f"paged does not serve the bench's model: {engine}")
    return engine


class _WholeDocuments(DocumentStore):
    """Each document is one chunk."""

    chunk_tokens = POSITIONS


class StreamTransport:
    """A `Transport` over a byte stream of length-prefixed messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send_bytes(self, data: bytes) -> None:
        try:
            self._writer.write(len(data).to_bytes(8, "little") + data)
            await self._writer.drain()
        except OSError as error:
            raise TransportClosed(1006, "") from error

    async def recv_bytes(self) -> bytes:
        try:
            return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(8), "little"))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TransportClosed(1006, "") from error

    async def close(self, code: int, reason: str) -> None:  # noqa: ARG002  # a byte stream has no close message
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of both processes. All files are in `folder`."""

    folder: Path
    device: Shape
    cloud: EmulatedForward
    documents: Mapping[Side, str]
    emulation: Emulation
    yields: bool = True  # the cloud's process runs at the lowest priority, as if on another machine

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    @property
    def prepared(self) -> Path:
        """KV of the cloud's passage, which the cloud sends to a baseline that requests it."""
        return self.folder / "prepared"

    def open_store(self, side: Side) -> DocumentStore:
        return _WholeDocuments.open(self.folder / side, HashEmbedder())

    def open_kv(self, side: Side) -> DocumentKvStore:
        return DocumentKvStore(self.folder / side / FOLDER, 1 << 30)

    def model(self, side: Side) -> LoadedModel:
        tokenizer = Tokenizer.load(DEVICE)
        size = tokenizer.vocab_size
        if side == "cloud":
            return LoadedModel(self.cloud.engine(size), tokenizer)
        return LoadedModel(PinnedEngine(random_engine(self.device, size, "bench device"), _cores()[0]), tokenizer)


@dataclass(frozen=True, slots=True)
class DeviceSide:
    """The running device side, linked to the cloud."""

    node: Node
    model: LoadedModel
    stores: Mapping[Side, DocumentStore]
    files: DocumentKvStore
    wire: Transport  # to the cloud, for baselines


@asynccontextmanager
async def two_sides(setting: Setting) -> AsyncIterator[DeviceSide]:
    """Start both sides, link them, and wait until the KV of each side's document is stored."""
    with ExitStack() as opened:
        stores: dict[Side, DocumentStore] = {}
        for side in SIDES:
            stores[side] = opened.enter_context(setting.open_store(side))
            stores[side].add_text(f"{side}.md", setting.documents[side], zone=side)
        cloud = get_context("spawn").Process(target=_cloud, args=(setting,), daemon=True)
        cloud.start()
        opened.callback(_end, cloud)
        files, model = setting.open_kv("device"), setting.model("device")
        node = Node("device", model, stores["device"], NodeParts(kept=Kept(kv=files)))
        async with node, AsyncExitStack() as running:
            while not (setting.socket.exists() and files.groups() and setting.open_kv("cloud").groups()):
                if not cloud.is_alive():
                    raise EngineError("the bench's other process has ended")
                await asyncio.sleep(0.05)
            link, wire = [await _dial(setting, kind) for kind in (_LINK, _LINE)]
            running.push_async_callback(wire.close, 1000, "")
            await running.enter_async_context(_linked(node, model, link))
            yield DeviceSide(node, model, stores, files, wire)


async def _dial(setting: Setting, kind: bytes) -> Transport:
    transport = StreamTransport(*await asyncio.open_unix_connection(setting.socket))
    await transport.send_bytes(kind)
    return transport


@asynccontextmanager
async def _linked(node: Node, model: LoadedModel, transport: Transport) -> AsyncIterator[None]:
    handshake = device_handshake(
        _introduction(model), device="device", keys=[_KEYS["device"]], server_key=_KEYS["cloud"].public_key
    )
    vocab_size = model.tokenizer.vocab_size
    link = Link(transport, handshake, vocab_size=vocab_size, on_up=lambda link: node.on_link(link, "cloud"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        await link.up.wait()
        try:
            yield
        finally:
            await link.close()


def _introduction(model: LoadedModel) -> Introduction:
    info = model.engine.info
    return Introduction(model.tokenizer.fingerprint, info.fingerprint, info.name, list(STRATEGIES), documents=1)


# ---- the other process ----------------------------------------------------------------------------------------------
def _cloud(setting: Setting) -> None:
    # Lowest priority, since a cloud on another machine would take no CPU time from the device.
    os.nice(19 if setting.yields else 0)
    if setting.yields and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(0, _cores()[1:] or _cores())
    torch.set_num_threads(1)
    asyncio.run(_served(setting))


def _end(cloud: BaseProcess) -> None:
    cloud.join(GRACE_S)
    if cloud.is_alive():
        cloud.terminate()
        cloud.join()


async def _served(setting: Setting) -> None:
    """Serve until both connections have ended."""
    model = setting.model("cloud")
    with setting.open_store("cloud") as store:
        node = Node("cloud", model, store, NodeParts(kept=Kept(kv=setting.open_kv("cloud"))))
        ended = {kind: asyncio.Event() for kind in (_LINK, _LINE)}

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = StreamTransport(reader, writer)
            kind = await stream.recv_bytes()
            async with emulated(stream, setting.emulation) as transport:
                if kind == _LINK:
                    await _serve_link(node, model, transport)
                else:
                    await _serve_baselines(setting, store, transport)
            writer.close()
            ended[kind].set()

        async with node, await asyncio.start_unix_server(accept, setting.socket):
            for event in ended.values():
                await event.wait()


async def _serve_link(node: Node, model: LoadedModel, transport: Transport) -> None:
    async def admit(_: object) -> bytes:
        return _KEYS["device"].public_key

    handshake = cloud_handshake(_introduction(model), _KEYS["cloud"])
    vocab_size = model.tokenizer.vocab_size
    on_up = lambda link: node.on_link(link, "device")  # noqa: E731
    await Link(transport, handshake, authenticate=admit, vocab_size=vocab_size, on_up=on_up).run()


async def _serve_baselines(setting: Setting, store: DocumentStore, transport: Transport) -> None:
    """Answer the baselines' requests: search, and send the passage as text, on request with its prepared KV."""
    while True:
        try:
            request = json.loads(await transport.recv_bytes())
        except TransportClosed:
            return
        (passage,) = await asyncio.to_thread(store.search, request["query"], 1)
        header = json.dumps({"text": passages_text(passage), "relevance": relevance(passage)}).encode() + b"\n"
        kv = setting.prepared.read_bytes() if request["kv"] else b""
        await transport.send_bytes(header + kv)
