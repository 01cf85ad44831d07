"""An emulated network between a link and its transport. `emulation.Shaper` computes arrival times; this module waits.
Order is kept in each direction, a close included.
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

MAX_IN_FLIGHT = 262_144  # bytes; then the sender waits, as for a full socket
ABNORMAL = 1006  # RFC 6455: the connection ended without a close frame

Item = bytes | TransportClosed | RemoteProtocolError  # a message, or the end of the stream


class Clock(Protocol):
    """Time in s from any origin."""

    def now(self) -> float: ...

    async def sleep_until(self, time: float) -> None: ...


class LoopClock:
    """Clock of the event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep_until(self, time: float) -> None:
        await asyncio.sleep(max(0.0, time - self.now()))


class DelayLine:
    """Messages in flight in one direction, in order."""

    def __init__(self, shaper: Shaper, clock: Clock, started: float) -> None:
        self._shaper = shaper
        self._clock = clock
        self._began = started
        self._items: deque[tuple[float, Item]] = deque()
        self._size = 0
        self._changed = asyncio.Condition()

    async def put(self, item: Item) -> None:
        """Send an item. Waits while too many bytes are in flight."""
        size = len(item) if isinstance(item, bytes) else 0
        async with self._changed:
            await self._changed.wait_for(lambda: self._size < MAX_IN_FLIGHT)
            arrival = self._began + self._shaper.schedule(self._clock.now() - self._began, size)
            self._items.append((arrival, item))
            self._size += size
            self._changed.notify_all()

    async def get(self) -> Item:
        """The next item, at its arrival time."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._items) > 0)
                entry = self._items[0]
            await self._clock.sleep_until(entry[0])
            async with self._changed:
                if not self._items or self._items[0] is not entry:
                    continue  # cut meanwhile
                self._items.popleft()
                self._size -= len(entry[1]) if isinstance(entry[1], bytes) else 0
                self._changed.notify_all()
                return entry[1]

    async def break_off(self, end: Item) -> None:
        """Drop all items in flight; `end` arrives at once."""
        async with self._changed:
            self._items.clear()
            self._size = 0
            self._items.append((self._clock.now(), end))
            self._changed.notify_all()


class EmulatedTransport:
    """A transport behind an emulated network. Works while `pumps` run; created by `emulated`."""

    def __init__(self, inner: Transport, emulation: Emulation, *, index: int, clock: Clock) -> None:
        started = clock.now()
        self._inner = inner
        self._clock = clock
        self._out = DelayLine(emulation.shaper("up", index), clock, started)
        self._in = DelayLine(emulation.shaper("down", index), clock, started)
        life = emulation.cut_after(index)
        self._cut_at = None if life is None else started + life
        self._ended = asyncio.Event()  # cut, or the close has been sent

    def pumps(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Coroutines to run concurrently while the transport is used."""
        return (self._pump_out, self._pump_in, self._cut)

    async def send_bytes(self, data: bytes) -> None:
        if self._ended.is_set():
            raise TransportClosed(ABNORMAL, "")
        await self._out.put(data)

    async def recv_bytes(self) -> bytes:
        item = await self._in.get()
        if isinstance(item, bytes):
            return item
        raise item

    async def close(self, code: int, reason: str) -> None:
        if not self._ended.is_set():
            await self._out.put(TransportClosed(code, reason))
            await self._ended.wait()

    def abort(self) -> None:
        self._ended.set()
        self._inner.abort()

    async def _pump_out(self) -> None:
        while True:
            item = await self._out.get()
            if self._ended.is_set():
                return  # dropped
            try:
                if isinstance(item, bytes):
                    await self._inner.send_bytes(item)
                elif isinstance(item, TransportClosed):
                    await self._inner.close(item.code, item.reason)
                    self._ended.set()
            except TransportClosed:
                self._ended.set()  # the other direction receives the reason

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
            self._ended.set()
            self._inner.abort()
            await self._in.break_off(TransportClosed(ABNORMAL, "cut by --emulate"))


@asynccontextmanager
async def emulated(
    inner: Transport, emulation: Emulation | None, *, index: int = 0, clock: Clock | None = None
) -> AsyncIterator[Transport]:
    """`inner` behind the emulated network, or `inner` itself without one. index: number of the link, from 0."""
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
