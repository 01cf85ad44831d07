"""Puts an emulated network between a link and its transport. What arrives when is `emulation.Shaper`'s to say; this
only waits. In one direction nothing overtakes, a goodbye included.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from paceline.errors import RemoteProtocolError
from paceline.runtime.link.emulation import Emulation, Shaper
from paceline.runtime.link.transport import Transport, TransportClosed

MAX_ON_THE_WAY = 262_144  # bytes; then the sender waits, as for a full socket
ABNORMAL = 1006  # RFC 6455: the connection ended without a close frame

Item = bytes | TransportClosed | RemoteProtocolError  # a message, or how the stream ends


class Clock(Protocol):
    """s of any origin, and a wait until then."""

    def now(self) -> float: ...

    async def sleep_until(self, time: float) -> None: ...


class LoopClock:
    """The event loop's."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep_until(self, time: float) -> None:
        await asyncio.sleep(max(0.0, time - self.now()))


class DelayLine:
    """What is on the way in one direction, in order."""

    def __init__(self, shaper: Shaper, clock: Clock, began: float) -> None:
        self._shaper = shaper
        self._clock = clock
        self._began = began
        self._items: deque[tuple[float, Item]] = deque()
        self._size = 0
        self._changed = asyncio.Condition()

    async def put(self, item: Item) -> None:
        """Waits while too much is on the way."""
        size = len(item) if isinstance(item, bytes) else 0
        async with self._changed:
            await self._changed.wait_for(lambda: self._size < MAX_ON_THE_WAY)
            arrival = self._began + self._shaper.schedule(self._clock.now() - self._began, size)
            self._items.append((arrival, item))
            self._size += size
            self._changed.notify_all()

    async def get(self) -> Item:
        """The next to arrive, when it does."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._items) > 0)
                entry = self._items[0]
            await self._clock.sleep_until(entry[0])
            async with self._changed:
                if not self._items or self._items[0] is not entry:
                    continue  # the line was broken off meanwhile
                self._items.popleft()
                self._size -= len(entry[1]) if isinstance(entry[1], bytes) else 0
                self._changed.notify_all()
                return entry[1]

    async def break_off(self, end: Item) -> None:
        """Lose what is on the way; `end` arrives at once."""
        async with self._changed:
            self._items.clear()
            self._size = 0
            self._items.append((self._clock.now(), end))
            self._changed.notify_all()


class EmulatedTransport:
    """A transport with a worse network in front. Works while `pumps` run; made by `emulated`."""

    def __init__(self, inner: Transport, emulation: Emulation, *, index: int, clock: Clock) -> None:
        began = clock.now()
        self._inner = inner
        self._clock = clock
        self._out = DelayLine(emulation.shaper("up", index), clock, began)
        self._in = DelayLine(emulation.shaper("down", index), clock, began)
        life = emulation.cut_after(index)
        self._cut_at = None if life is None else began + life
        self._gone = asyncio.Event()  # cut, or the goodbye has been sent

    def pumps(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """To be run side by side while the transport is used."""
        return (self._pump_out, self._pump_in, self._cut)

    async def send_bytes(self, data: bytes) -> None:
        if self._gone.is_set():
            raise TransportClosed(ABNORMAL, "")
        await self._out.put(data)

    async def recv_bytes(self) -> bytes:
        item = await self._in.get()
        if isinstance(item, bytes):
            return item
        raise item

    async def close(self, code: int, reason: str) -> None:
        if not self._gone.is_set():
            await self._out.put(TransportClosed(code, reason))
            await self._gone.wait()

    def abort(self) -> None:
        self._gone.set()
        self._inner.abort()

    async def _pump_out(self) -> None:
        while True:
            item = await self._out.get()
            if self._gone.is_set():
                return  # lost on the way
            try:
                if isinstance(item, bytes):
                    await self._inner.send_bytes(item)
                elif isinstance(item, TransportClosed):
                    await self._inner.close(item.code, item.reason)
                    self._gone.set()
            except TransportClosed:
                self._gone.set()  # how it ended comes by the other direction

    async def _pump_in(self) -> None:
        while True:
            try:
                await self._in.put(await self._inner.recv_bytes())
            except (TransportClosed, RemoteProtocolError) as end:
                await self._in.put(end)
                return

    async def _cut(self) -> None:
        if self._cut_at is not None:
            await self._clock.sleep_until(self._cut_at)
            self._gone.set()
            self._inner.abort()
            await self._in.break_off(TransportClosed(ABNORMAL, "cut by --emulate"))


@asynccontextmanager
async def emulated(
    inner: Transport, emulation: Emulation | None, *, index: int = 0, clock: Clock | None = None
) -> AsyncIterator[Transport]:
    """`inner` behind this network; `inner` itself where none is to be emulated. `index` counts the links, from 0."""
    if emulation is None or not emulation.has_link:
        yield inner
        return
    transport = EmulatedTransport(inner, emulation, index=index, clock=clock or LoopClock())
    async with asyncio.TaskGroup() as tasks:
        pumps = [tasks.create_task(_run(pump)) for pump in transport.pumps()]
        try:
            yield transport
        finally:
            for task in pumps:
                task.cancel()


async def _run(pump: Callable[[], Awaitable[None]]) -> None:
    await pump()
