"""One model that is loaded when it is first asked for, and can be unloaded while nobody uses it."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from paceline.engine.base import ModelInfo
from paceline.engine.heap import trim_heap
from paceline.errors import EngineError, PacelineError, RequestError
from paceline.runtime.node import Node
from paceline.runtime.served_models.loads import ended, total
from paceline.runtime.service import Load, ModelState

log = logging.getLogger("paceline.models")

Open = Callable[["ModelSlot"], Awaitable[AbstractAsyncContextManager[Node]]]
"""Loads the model of a slot into a node, which the slot enters and leaves. Raises PacelineError."""


@dataclass(eq=False)
class _Life:
    """The model from one loading to its unloading."""

    opened: asyncio.Future[Node]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def fail(self, error: PacelineError) -> None:
        """Tell those who wait for the loading, if any do."""
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # nobody may be waiting any more


class ModelSlot:
    """Belongs to the loop of the server. Its node lives in a task of its own, so that a client that leaves while the
    model is being loaded takes nothing with it."""

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
        self.lost = asyncio.Event()  # its engine cannot be used any more
        self._open = open_node
        self._now = now
        self._users = 0
        self._used_at = now()
        self._life: _Life | None = None
        self._ending: asyncio.Task[None] | None = None  # of an earlier life
        self._past = Load(kv_rows=0, kv_free_rows=0)  # of earlier lives

    @property
    def node(self) -> Node | None:
        """None where it is not loaded."""
        return self._life.opened.result() if self._life is not None and self.state == "loaded" else None

    @property
    def state(self) -> ModelState:
        if self._life is None:
            return "unloaded"
        return "loaded" if self._life.opened.done() else "loading"

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
        node = await self.take()
        try:
            yield node
        finally:
            self.give_back()

    async def take(self) -> Node:
        """As `used`, until `give_back`."""
        if self._life is None:
            self._life = _Life(asyncio.get_running_loop().create_future())
            self._life.task = asyncio.create_task(self._live(self._life, self._ending))
        self._users += 1
        try:
            return await asyncio.shield(self._life.opened)
        except PacelineError as error:
            self.give_back()
            raise _unavailable(self.info.name, str(error)) from error
        except BaseException:  # the client has left
            self.give_back()
            raise

    def give_back(self) -> None:
        self._users -= 1
        assert self._users >= 0, self.info.name
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
        if self._life is not None:
            await self._end(self._life)
        elif self._ending is not None:
            await asyncio.wait([self._ending])
        # A model's modules refer to each other in circles, and glibc keeps what is freed. Nothing here may hold the
        # node by now.
        await asyncio.to_thread(_give_back_memory)

    async def _end(self, life: _Life) -> None:
        assert life.task is not None
        self._past = ended(self.load())
        self._life, self._ending = None, life.task
        life.stop.set()
        if not life.opened.done():
            life.task.cancel()
        await asyncio.wait([life.task])
        life.fail(EngineError("the program ends"))

    async def _live(self, life: _Life, earlier: asyncio.Task[None] | None) -> None:
        try:
            if earlier is not None:
                await asyncio.wait([earlier])  # two of the same would need memory twice
            began = self._now()
            async with await self._open(self) as node:
                self.info = node.models()[0]
                log.info("%s is loaded, %.1f s", self.info.name, self._now() - began)
                life.opened.set_result(node)
                await self._until_stopped(life, node)
        except Exception as error:
            if life.opened.done() or not isinstance(error, PacelineError):
                log.exception("%s cannot be loaded, or not be unloaded", self.info.name)
            life.fail(error if isinstance(error, PacelineError) else EngineError(str(error)))
        finally:
            if self._life is life:
                self._life = None

    async def _until_stopped(self, life: _Life, node: Node) -> None:
        lost = asyncio.create_task(node.until_lost())
        stopped = asyncio.create_task(life.stop.wait())
        try:
            await asyncio.wait((lost, stopped), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                self.lost.set()
            await stopped
        finally:
            lost.cancel()
            stopped.cancel()


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
