"""Two nodes linked in memory: joint answers, loss and return of a peer, cancellation, limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
import pytest

from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import EVERYBODY, MayAsk
from paceline.engine.base import LoadedModel, Output, ServedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.errors import RequestError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.asking import AskCounter, CloudAsks
from paceline.runtime.link.connection import Link
from paceline.runtime.node import Node
from paceline.runtime.resources import Company, Computing, NodeParts
from paceline.runtime.service import Generation, GenerationResult
from paceline.runtime.stimuli import StimulusLog
from paceline.strategies.base import SIDES, Side
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Introduction
from tests.requests import a_request, changed
from tests.runtime.link.test_connection import Pipe, pipes
from tests.wire.identities import CLOUD, DEVICE, admit, cloud_end, device_end, known_as

pytestmark = pytest.mark.anyio

REQUEST = a_request(
    messages=({"role": "user", "content": "Where is the key?"},),
    sampling=SamplingParams(temperature=1.0, seed=5),
    max_tokens=24,
    strategy="aggregate",
)


def open_gate(may_ask: MayAsk = EVERYBODY) -> CloudAsks:
    """The gate of a device that these clients of its cloud may ask, as often as they like."""
    return CloudAsks(may_ask, AskCounter(10_000, 10_000))


class GatedEngine(FakeEngine):
    """An engine that runs `allowed` forwards, then waits for permits."""

    def __init__(self, seed: int, max_positions: int = 4096) -> None:
        super().__init__(seed=seed, spread=0.3, max_positions=max_positions)
        self.gate = threading.Semaphore(0)
        self.open = False

    def forward(self, batch: Batch) -> Output:
        if not self.open:
            self.gate.acquire()
        return super().forward(batch)

    def held(self) -> list[int]:
        """Sequences that still have rows; nodes number them from 1."""
        return [seq for seq in range(1, 100) if self.length(SeqId(seq))]

    def release_gate(self) -> None:
        self.open = True
        self.gate.release()


HARBOUR = Passage("harbour.md", 1, "", "The harbour opens at eight.", 0.6)
LANDLORD = Passage("notes.md", 1, "", "My landlord is called Velda.", 0.5)


class Passages:
    """A store that returns these passages for every query. wait_for: what a search waits for."""

    def __init__(self, *passages: Passage, wait_for: threading.Event | None = None) -> None:
        self._passages, self._wait_for = passages, wait_for
        self.queries: list[str] = []

    def count(self, _selection: object = None) -> int:
        return len(self._passages)

    def removals(self) -> int:
        return 0

    def search(self, query: str, k: int, *_selection: object, min_score: float = 0.0, **_: object) -> list[Passage]:
        self.queries.append(query)
        assert self._wait_for is None or self._wait_for.wait(60.0), "the search was never let go"
        return [passage for passage in self._passages if passage.score >= min_score][:k]


@dataclass(slots=True)
class Bench:
    cloud: Node
    device: Node
    engines: dict[Side, GatedEngine] = field(default_factory=dict)  # those whose gates a test opens
    pipes_in_use: tuple[Pipe, Pipe] | None = None
    links: tuple[Link, Link] | None = None
    may_ask: MayAsk = EVERYBODY  # as the device tells its cloud
    words: str = ""  # the cloud's tokenizer as it tells of it, where that is another than its own

    def of(self, side: Side) -> Node:
        return self.cloud if side == "cloud" else self.device

    def have(self, device: Passages, cloud: Passages) -> None:
        """Give the sides these documents."""
        for node, store in ((self.device, device), (self.cloud, cloud)):
            node._resources.store = cast(DocumentStore, store)

    def introduction(self, side: Side) -> Introduction:
        """The introduction that a side sends of itself."""
        resources, general = self.of(side)._resources, CLOUD if side == "cloud" else DEVICE
        told = known_as(general, (side == "cloud" and self.words) or resources.tokenizer.fingerprint, [*STRATEGIES])
        told = msgspec.structs.replace(told, model=resources.info.fingerprint, num_weights=resources.info.num_weights)
        asked_by = None if self.may_ask.names is None else [*self.may_ask.names]
        return told if side == "cloud" else msgspec.structs.replace(told, asked_by=asked_by)

    async def link(self, tasks: asyncio.TaskGroup) -> None:
        self.pipes_in_use = left, right = pipes()
        vocab_size = self.cloud._resources.tokenizer.vocab_size
        device = Link(
            left,
            device_end(self.introduction("device")),
            vocab_size=vocab_size,
            on_up=lambda link: self.device.on_link(link, "cloud"),
        )
        cloud = Link(
            right,
            cloud_end(self.introduction("cloud")),
            authenticate=admit,
            vocab_size=vocab_size,
            on_up=lambda link: self.cloud.on_link(link, "laptop"),
        )
        self.links = device, cloud
        tasks.create_task(device.run())
        tasks.create_task(cloud.run())
        await device.up.wait()
        await cloud.up.wait()

    async def unlink(self) -> None:
        """Break the link without a close frame."""
        assert self.pipes_in_use is not None and self.links is not None
        for end in self.pipes_in_use:
            end.abort()
        for link in self.links:
            await link.closed.wait()


@asynccontextmanager
async def side_by_side(
    bench: Bench, *, linked: bool = True, within_s: float | None = 120
) -> AsyncIterator[asyncio.TaskGroup]:
    """Both nodes, started, and linked if they are to be; at the end nothing waits for a gate."""
    async with asyncio.timeout(within_s), bench.cloud, bench.device, asyncio.TaskGroup() as tasks:
        if linked:
            await bench.link(tasks)
        try:
            yield tasks
        finally:
            for engine in bench.engines.values():
                engine.release_gate()
            if bench.links is not None:
                await bench.links[0].close()
                await bench.links[1].closed.wait()


def bench_of(
    models: Mapping[Side, ServedModel],
    stores: Mapping[Side, DocumentStore] = MappingProxyType({}),
    parts: Mapping[Side, NodeParts] = MappingProxyType({}),
    **more: Any,
) -> Bench:
    """Two nodes, of which the device may be asked unless its parts say otherwise. more: of the bench."""
    open_to_all = {side: NodeParts(company=Company(asks=open_gate())) for side in SIDES}
    made = {side: Node(side, models[side], stores.get(side), (open_to_all | {**parts})[side]) for side in SIDES}
    return Bench(made["cloud"], made["device"], **more)


@asynccontextmanager
async def linked(cloud: ServedModel, device: ServedModel, within_s: float | None = 120) -> AsyncIterator[Bench]:
    """A cloud and a device with these models and no documents."""
    async with side_by_side(bench := bench_of({"cloud": cloud, "device": device}), within_s=within_s):
        yield bench


@contextmanager
def stores_of(folder: Path, documents: Mapping[Side, Mapping[str, str]]) -> Iterator[dict[Side, DocumentStore]]:
    """A store of each side. documents: their texts, by name."""
    with ExitStack() as stack:
        stores = {
            side: stack.enter_context(DocumentStore.open(folder / side, HashEmbedder(), side=side)) for side in SIDES
        }
        for side, texts in documents.items():
            for name, text in texts.items():
                stores[side].add_text(name, text, zone=side)
        yield stores


@asynccontextmanager
async def nodes(
    *,
    gated: tuple[Side, ...] = (),
    linked: bool = True,
    max_positions: int = 4096,
    may_ask: MayAsk = EVERYBODY,
    words: str = "",
    sizes: Mapping[Side, int] = MappingProxyType({}),
    stores: Mapping[Side, DocumentStore] = MappingProxyType({}),
    stimuli: Mapping[Side, StimulusLog] = MappingProxyType({}),
) -> AsyncIterator[tuple[Bench, asyncio.TaskGroup]]:
    """Two nodes without documents, unless they have stores. sizes: of their models, in weights."""
    engines: dict[Side, GatedEngine] = {"cloud": GatedEngine(1, max_positions), "device": GatedEngine(2, max_positions)}
    for side, engine in engines.items():
        engine.open = side not in gated
    models = {side: LoadedModel(engine, ByteTokenizer()) for side, engine in engines.items()}
    parts = {
        side: NodeParts(computing=Computing(stimuli=stimuli.get(side)), company=Company(asks=open_gate(may_ask)))
        for side in SIDES
    }
    bench = bench_of(models, stores, parts, engines=engines, may_ask=may_ask, words=words)
    for side, size in sizes.items():
        resources = bench.of(side)._resources
        resources.info = replace(resources.info, num_weights=size)
    async with side_by_side(bench, linked=linked) as tasks:
        yield bench, tasks
    for engine in engines.values():
        assert not engine.held(), "blocks leaked"


async def collect(session: Generation) -> tuple[str, GenerationResult]:
    *told, done = [event async for event in session.run()]
    assert isinstance(done, GenerationResult)
    return "".join(event.text for event in told if not isinstance(event, GenerationResult)), done


@pytest.mark.parametrize("front", ["device", "cloud"])
async def test_variables_of_the_chat_template_reach_both_sides(front: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    render = ByteTokenizer.chat

    def heard_too(self: ByteTokenizer, messages: Sequence[Mapping[str, object]], **fields: Any) -> list[int]:
        heard.append(dict(fields["template_kwargs"]))
        return render(self, messages, **fields)

    monkeypatch.setattr(ByteTokenizer, "chat", heard_too)
    async with nodes() as (bench, _):
        fields = {"enable_thinking": False, "style": {"words": ["brief"]}}
        _, done = await collect(await bench.of(front).prepare(changed(REQUEST, template=fields, max_tokens=4)))
        assert done.degraded is None and heard == [fields, fields]


async def test_the_context_is_never_exceeded_and_never_silently_truncated() -> None:
    async with nodes(linked=False, max_positions=64) as (bench, _):
        request = changed(REQUEST, max_tokens=None, sampling=SamplingParams(logit_bias={256: -100.0}))
        _, done = await collect(await bench.cloud.prepare(request))
        assert done.reason == "length"
        assert done.prompt_tokens + done.completion_tokens == 64
        long = changed(request, messages=({"role": "user", "content": "x" * 80},))
        with pytest.raises(RequestError, match="maximum context length is 64 tokens") as refused:
            await bench.cloud.prepare(long)
        assert refused.value.code == "context_length_exceeded"
        assert bench.cloud._places._shares.taken == 0, "it gives its place back"


async def test_cancellation_releases_all_sequences_on_both_sides() -> None:
    """`nodes` asserts at the end that neither engine holds a sequence."""
    async with nodes() as (bench, _):
        session = await bench.cloud.prepare(REQUEST)
        events = session.run()
        await anext(events)
        await events.aclose()
        assert bench.cloud.load().answers == 0
        other = await bench.cloud.prepare(REQUEST)  # prepared but never run
        await other.aclose()
        assert bench.cloud.load().answers == 0
