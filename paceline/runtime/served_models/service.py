"""The `Service` over a node that is always there and further models that are loaded on demand.

Documents, admission, embedder and links are the first node's. A link joins the first models of both sides, whose
tokenizers are the same; a further model with that tokenizer asks the peer's first model likewise, another writes alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self, TypeVar

from paceline.engine.base import ModelInfo
from paceline.errors import EngineLost
from paceline.rag.store.library import Library
from paceline.runtime.node import Node
from paceline.runtime.served_models.loads import total
from paceline.runtime.served_models.memory import ModelMemory
from paceline.runtime.service import (
    EmbedderInfo,
    Embeddings,
    GenerateEvent,
    GenerateRequest,
    Generation,
    LinkState,
    Load,
    Logprobs,
    ModelStatus,
    Readiness,
    Reranked,
)
from paceline.strategies.base import Side
from paceline.workflow.builder import WorkflowName

T = TypeVar("T")
log = logging.getLogger("paceline.models")

WATCH_S: Final = 1.0  # between looks at what is idle


class ServedModels:
    """Use as an async context manager inside that of the first node, on the loop that serves it."""

    def __init__(self, first: Node, memory: ModelMemory) -> None:
        """memory: with the further models, which have names of their own."""
        self._first = first
        self._slots = {slot.info.name: slot for slot in memory.slots}
        assert len(self._slots) == len(memory.slots) and first.models()[0].name not in self._slots, "names are unique"
        self._memory = memory
        self._unloading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._unloading = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unloading is not None:
            self._unloading.cancel()
            await asyncio.wait([self._unloading])
        for slot in self._slots.values():
            await slot.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._memory.unload_idle()
            except Exception:  # of one model: the others are still looked after
                log.exception("idle models could not be unloaded")

    @asynccontextmanager
    async def _node(self, model: str) -> AsyncIterator[Node]:
        slot = self._slots.get(model)
        if slot is None:
            yield self._first
            return
        async with slot.used() as node:
            yield node

    async def until_lost(self) -> None:
        """Wait until the engine of one of the models cannot be used any more."""
        waits = [asyncio.create_task(lost.wait()) for lost in (self._first.worker.lost, *self._losses())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def lost(self) -> EngineLost | None:
        """Why one of them cannot be used any more; None while all can."""
        further = (slot.node.lost for slot in self._slots.values() if slot.node is not None)
        return self._first.lost or next(filter(None, further), None)

    def _losses(self) -> Iterator[asyncio.Event]:
        return (slot.lost for slot in self._slots.values())

    # ---- of each model ----------------------------------------------------------------------------------------------
    def models(self) -> Sequence[ModelInfo]:
        return (*self._first.models(), *(slot.info for slot in self._slots.values()))

    def model_status(self, name: str) -> ModelStatus:
        slot = self._slots.get(name)
        return self._first.model_status(name) if slot is None else ModelStatus(slot.state, slot.is_joint)

    async def tokenize(self, text: str, model: str) -> tuple[int, ...]:
        async with self._node(model) as node:
            return await node.tokenize(text)

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]], model: str) -> tuple[int, ...]:
        async with self._node(model) as node:
            return await node.tokenize_chat(messages)

    async def token_bytes(self, tokens: Sequence[int], model: str) -> tuple[bytes, ...]:
        async with self._node(model) as node:
            return await node.token_bytes(tokens)

    async def check(self, request: GenerateRequest, *, room: int) -> None:
        async with self._node(request.model) as node:
            await node.check(request, room=room)

    async def score(self, prompt: Sequence[int], top: int, model: str) -> Sequence[Logprobs]:
        async with self._node(model) as node:
            return await node.score(prompt, top)

    async def prepare(self, request: GenerateRequest) -> Generation:
        slot = self._slots.get(request.model)
        if slot is None:
            return await self._first.prepare(request)
        await self.wait_for_room(request.owner)  # a model is not loaded for what is refused anyway
        node = await slot.take()
        try:
            return _Kept(await node.prepare(request), slot.give_back)
        except BaseException:
            slot.give_back()
            raise

    def load(self) -> Load:
        return total(self._first.load(), (slot.load() for slot in self._slots.values()))

    # ---- of the first, for all --------------------------------------------------------------------------------------
    @property
    def side(self) -> Side:
        return self._first.side

    @property
    def library(self) -> Library | None:
        return self._first.library

    async def find(self, work: Callable[[], T]) -> T:
        return await self._first.find(work)

    def strategies(self) -> Sequence[str]:
        return self._first.strategies()

    def workflows(self) -> Sequence[WorkflowName]:
        return self._first.workflows()

    def embedders(self) -> Sequence[EmbedderInfo]:
        return self._first.embedders()

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        return await self._first.embed(texts)

    def rerankers(self) -> Sequence[str]:
        return self._first.rerankers()

    async def rerank(self, query: str, passages: Sequence[str]) -> Reranked:
        return await self._first.rerank(query, passages)

    async def wait_for_room(self, owner: str) -> None:
        await self._first.wait_for_room(owner)

    def readiness(self) -> Readiness:
        known = self._first.readiness()
        loaded = [slot.info.name for slot in self._slots.values() if slot.state == "loaded"]
        return replace(known, detail={**known.detail, "also_loaded": ", ".join(loaded)})

    def links(self) -> Sequence[LinkState]:
        return self._first.links()


@dataclass(slots=True)
class _Kept:
    """A generation whose model stays loaded until it has ended."""

    generation: Generation
    release: Callable[[], None]
    _released: bool = field(default=False, init=False)

    @property
    def prompt_tokens(self) -> int:
        return self.generation.prompt_tokens

    async def run(self) -> AsyncIterator[GenerateEvent]:
        try:
            async with aclosing(self.generation.run()) as events:  # type: ignore[type-var]  # every one is a generator
                async for event in events:
                    yield event
        finally:
            self._end()

    async def aclose(self) -> None:
        try:
            await self.generation.aclose()
        finally:
            self._end()

    def _end(self) -> None:
        if not self._released:
            self._released = True
            self.release()
