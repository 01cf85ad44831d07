"""Several models behind one `Service`: one node for each that is loaded, with documents, keys and admission in common.

A model is loaded at the first call, kept while it is used, and unloaded when another one needs its memory.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Self

from paceline.engine.base import ModelInfo
from paceline.errors import EngineError, EngineLost, PacelineError, RequestError
from paceline.runtime.node import Node
from paceline.runtime.service import (
    GenerateEvent,
    GenerateRequest,
    Generation,
    Load,
    ModelState,
    ModelStatus,
    Readiness,
)
from paceline.system import trim_heap

log = logging.getLogger("paceline.models")

_COUNTED: Final = ("steps", "rows", "cached_rows", "preemptions")  # since the start; never fewer
_HELD: Final = ("answers", "waiting")


def total(first: Load, others: Iterable[Load]) -> Load:
    """What several engines have done together; links are the first's, and memory has no bound where one engine's has
    none."""
    loads = (first, *others)
    counts = {name: sum(getattr(load, name) for load in loads) for name in (*_COUNTED, *_HELD)}
    return replace(
        first,
        **counts,
        kv_rows=_bounded(load.kv_rows for load in loads),
        kv_free_rows=_bounded(load.kv_free_rows for load in loads),
    )


def _bounded(rows: Iterable[int | None]) -> int | None:
    known = list(rows)
    return None if None in known else sum(each for each in known if each is not None)


def ended(load: Load) -> Load:
    """What stays counted of an engine that is no more."""
    return Load(**{name: getattr(load, name) for name in _COUNTED}, kv_rows=0, kv_free_rows=0)


Open = Callable[["ModelSlot"], Awaitable[AbstractAsyncContextManager[Node]]]
"""Loads the model of a slot into a node, which the slot enters and leaves. Raises PacelineError."""
Loading = asyncio.Task[tuple[Node, AsyncExitStack]]  # with what leaves the node


class ModelSlot:
    """One model that is loaded when it is first asked for, and can be unloaded while nobody uses it.

    Belongs to the loop of the server. Loads in a task of its own, so that a client that leaves meanwhile takes nothing
    with it.
    """

    def __init__(
        self,
        info: ModelInfo,
        open_node: Open,
        *,
        is_joint: bool = False,
        weights: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """info: what is known before it is loaded. is_joint: see `ModelStatus`. weights: bytes of them on the disk.
        now: s."""
        self.info = info
        self.is_joint = is_joint
        self.weights = weights
        self._open = open_node
        self._now = now
        self._users = 0
        self._used_at = now()
        self._loading: Loading | None = None  # done: it is loaded
        self._ending: asyncio.Task[None] | None = None  # the last unloading
        self._past = Load(kv_rows=0, kv_free_rows=0)  # until then

    @property
    def node(self) -> Node | None:
        """None where it is not loaded."""
        return self._loading.result()[0] if self._loading is not None and self.state == "loaded" else None

    @property
    def state(self) -> ModelState:
        if self._loading is None:
            return "unloaded"
        return "loaded" if self._loading.done() else "loading"

    @property
    def idle_s(self) -> float | None:
        """Seconds since it was last used; None where it is not loaded, and while it is used."""
        return self._now() - self._used_at if self.state == "loaded" and not self._users else None

    def load(self) -> Load:
        """What its engine has done since the start of the program."""
        return self._past if self.node is None else total(self.node.load(), [self._past])

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Node]:
        """The node, which stays as long as this context. Raises RequestError for a model that cannot be loaded."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(self._ending))
            self._loading.add_done_callback(lambda done: done.cancelled() or done.exception())  # all may have left
        loading = self._loading
        self._users += 1
        try:
            try:
                node, _ = await asyncio.shield(loading)
            except BaseException as error:
                if loading.cancelled():
                    raise _unavailable(self.info.name, "the program ends") from error
                if isinstance(error, PacelineError):
                    raise _unavailable(self.info.name, str(error)) from error
                raise  # the client has left
            yield node
        finally:
            self._users -= 1
            self._used_at = self._now()

    async def unload(self) -> bool:
        """Unload it; False where it is being used or is not loaded."""
        if self.idle_s is None:
            return False
        await self.close()
        log.info("%s is unloaded", self.info.name)
        return True

    async def close(self) -> None:
        """Unload it in any case; its answers fail."""
        if self._loading is not None:
            self._past = ended(self.load())
            self._ending, self._loading = asyncio.create_task(self._leave(self._loading)), None
        if self._ending is not None:
            await asyncio.wait([self._ending])
        # A model's modules refer to each other in circles, and glibc keeps what is freed. Nothing here may hold the
        # node by now.
        await asyncio.to_thread(_give_back_memory)

    async def _load(self, ending: asyncio.Task[None] | None) -> tuple[Node, AsyncExitStack]:
        try:
            if ending is not None:
                await asyncio.wait([ending])  # two of the same would need memory twice
            await asyncio.to_thread(_give_back_memory)  # of one that could not be loaded, perhaps this one
            began, entered = self._now(), AsyncExitStack()
            node = await entered.enter_async_context(await self._open(self))
        except BaseException as error:
            if self._loading is asyncio.current_task():
                self._loading = None
            if isinstance(error, PacelineError) or not isinstance(error, Exception):
                raise
            log.exception("%s cannot be loaded", self.info.name)
            raise EngineError(str(error)) from error
        self.info = node.models()[0]
        log.info("%s is loaded, %.1f s", self.info.name, self._now() - began)
        return node, entered

    async def _leave(self, loading: Loading) -> None:
        loading.cancel()  # without effect where it is loaded
        await asyncio.wait([loading])
        if not loading.cancelled() and loading.exception() is None:
            try:
                await loading.result()[1].aclose()
            except Exception:
                log.exception("%s cannot be unloaded", self.info.name)


def _unavailable(name: str, why: str) -> RequestError:
    return RequestError(
        f"The model {name} cannot be loaded now: {why}",
        status=503,
        type="server_error",
        code="model_unavailable",
        param="model",
    )


def _give_back_memory() -> None:
    gc.collect()
    trim_heap()
    if "torch" in sys.modules:  # else there is nothing of it to give back
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


OVERHEAD: Final = 1.25  # of what a model takes, to the size of its weights
SHORT: Final = 1 / 16  # of all memory: with less left, idle models go


class ModelMemory:
    """The models that are loaded on demand, and which of them are unloaded: those that were idle for long, and the
    longest idle ones where memory is short. Belongs to the loop of the server."""

    def __init__(self, *, idle_s: float, free: Callable[[], int], total: int) -> None:
        """idle_s: after which a model is unloaded. free, total: bytes of the memory that models are loaded into."""
        self.slots: list[ModelSlot] = []
        self._idle_s = idle_s
        self._free = free
        self._total = total
        self._loading = asyncio.Lock()

    async def unload_idle(self) -> None:
        """Unload what is due now."""
        for slot in self.slots:
            if slot.idle_s is not None and slot.idle_s >= self._idle_s:
                await slot.unload()
        while (longest := self._longest_idle()) is not None and self._free() < SHORT * self._total:
            await longest.unload()

    @asynccontextmanager
    async def room_for(self, slot: ModelSlot) -> AsyncIterator[None]:
        """Memory to load this model, one at a time; others that are idle are unloaded for it. Raises EngineError where
        that is not enough."""
        async with self._loading:
            needed = int(OVERHEAD * slot.weights)
            while self._free() < needed and (longest := self._longest_idle()) is not None:
                await longest.unload()
            if (free := self._free()) < needed:
                loaded = ", ".join(each.info.name for each in self.slots if each.state == "loaded")
                beside = f" beside {loaded}, in use now: try again later" if loaded else ""
                raise EngineError(
                    f"it needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free{beside}."
                )
            yield

    def _longest_idle(self) -> ModelSlot | None:
        idle = [(slot.idle_s, number) for number, slot in enumerate(self.slots) if slot.idle_s is not None]
        return self.slots[max(idle)[1]] if idle else None


WATCH_S: Final = 1.0  # between looks at what is idle, or lost


class ServedModels:
    """The `Service` over a node that is always there and further models that are loaded on demand.

    Documents, admission, embedder and links are the first node's. A link joins the first models of both sides, whose
    tokenizers are the same; a further model with that tokenizer asks the peer's first model likewise, another writes
    alone. Use as an async context manager inside that of the first node, on the loop that serves it.
    """

    aliases: Mapping[str, str] = {}  # replaced at the start, never changed

    def __init__(self, first: Node, memory: ModelMemory, *, debug_options: bool = False) -> None:
        """memory: with the further models, which have names of their own. debug_options: as of `Service`."""
        self.debug_options = debug_options
        self._first = first
        self.library = first.library
        self.side, self.find, self.wait_for_room, self.links = first.side, first.find, first.wait_for_room, first.links
        self.strategies, self.workflows = first.strategies, first.workflows
        self.embedders, self.embed = first.embedders, first.embed
        self.rerankers, self.rerank, self.confirm = first.rerankers, first.rerank, first.confirm
        self._slots = {slot.info.name: slot for slot in memory.slots}
        assert len(self._slots) == len(memory.slots) and first.models()[0].name not in self._slots, "names are unique"
        self._memory = memory
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
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
    async def of(self, model: str) -> AsyncIterator[Node]:
        slot = self._slots.get(model)
        if slot is None:
            yield self._first
            return
        async with slot.used() as node:
            yield node

    async def until_lost(self) -> None:
        """Wait until the engine of one of the models cannot be used any more."""
        while self.lost is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._first.worker.lost.wait(), WATCH_S)

    @property
    def lost(self) -> EngineLost | None:
        """Why one of them cannot be used any more; None while all can."""
        further = (slot.node.lost for slot in self._slots.values() if slot.node is not None)
        return self._first.lost or next(filter(None, further), None)

    # ---- of each model ----------------------------------------------------------------------------------------------
    def models(self) -> Sequence[ModelInfo]:
        return (*self._first.models(), *(slot.info for slot in self._slots.values()))

    def model_status(self, name: str) -> ModelStatus:
        slot = self._slots.get(name)
        return self._first.model_status(name) if slot is None else ModelStatus(slot.state, slot.is_joint)

    async def prepare(self, request: GenerateRequest) -> Generation:
        if request.model not in self._slots:
            return await self._first.prepare(request)
        async with AsyncExitStack() as used:
            node = await used.enter_async_context(self.of(request.model))
            return _Kept(await node.prepare(request), used.pop_all())

    async def forget_answers(self, owner: str) -> None:
        for node in (self._first, *(slot.node for slot in self._slots.values())):
            if node is not None:
                await node.forget_answers(owner)

    def load(self) -> Load:
        return total(self._first.load(), (slot.load() for slot in self._slots.values()))

    def readiness(self) -> Readiness:
        known = self._first.readiness()
        loaded = [slot.info.name for slot in self._slots.values() if slot.state == "loaded"]
        return replace(known, detail={**known.detail, "also_loaded": ", ".join(loaded)})


@dataclass(slots=True)
class _Kept:
    """A generation whose model stays loaded until it has ended."""

    generation: Generation
    used: AsyncExitStack

    @property
    def prompt_tokens(self) -> int:
        return self.generation.prompt_tokens

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        try:
            async with aclosing(self.generation.run()) as events:
                async for event in events:
                    yield event
        finally:
            await self.used.aclose()

    async def aclose(self) -> None:
        async with self.used:
            await self.generation.aclose()
