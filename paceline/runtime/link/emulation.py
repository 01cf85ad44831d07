"""An emulated network between a link and its transport: the setting `emulate`, `rtt=100ms,jitter=20ms,rate=10mbit`.

The setting also names a slower engine (`forward=60ms,row=0.5ms`), see `engine.base.delay_forwards`.

Models each direction as a reliable, ordered stream such as TCP: a lost packet delays itself and all later ones until
its retransmission. Not modelled: slow start, congestion, packets of other connections.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

from paceline.errors import ConfigError, RemoteProtocolError
from paceline.runtime.link.transport import Transport, TransportClosed

PACKET_BYTES = 1448  # an Ethernet payload of 1500 bytes less the headers of IP and TCP with timestamps
MIN_RETRANSMIT_S = 0.2  # Linux's TCP_RTO_MIN; RFC 6298 has 1 s
MAX_RETRANSMIT_S = 60.0
MAX_IN_FLIGHT = 262_144  # bytes; then the sender waits, as for a full socket

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-z]*)")

Item = bytes | TransportClosed | RemoteProtocolError  # a message, or the end of the stream


def _quantity(text: str, units: dict[str, float]) -> float:
    match = _NUMBER.fullmatch(text.lower())
    if match is None or match[2] not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2]]


def _rate(text: str) -> float:
    if (rate := _quantity(text, _RATES)) < 1:
        raise ValueError(text)
    return rate


def _probability(text: str) -> float:
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value < 1:
        raise ValueError(text)
    return value


_TIME = partial(_quantity, units=_UNITS), "a time such as 100ms or 0.1s"
_ITEMS: dict[str, tuple[Callable[[str], float], str]] = {  # of the setting: how each is read, and what it takes
    "rtt": _TIME,
    "jitter": _TIME,
    "rate": (_rate, "bits per second such as 10mbit or 500kbit"),
    "loss": (_probability, "a probability such as 0.01 or 1%, below 1"),
    "forward": _TIME,
    "row": _TIME,
}


@dataclass(frozen=True, slots=True)
class Emulation:
    """Conditions of a link, the same in both directions. Set them on one side only: those of two sides add up.

    `forward` and `row` are for this side's engine: minimum time of a forward, and for each further row with logits.
    """

    rtt: float = 0.0  # s
    jitter: float = 0.0  # s: each direction's delay is rtt / 2, plus or minus up to this
    rate: float = math.inf  # bit/s in each direction
    loss: float = 0.0  # probability that a packet is lost
    forward: float = 0.0  # s
    row: float = 0.0  # s

    @classmethod
    def parse(cls, text: str) -> Emulation:
        """The setting's text. Raises ConfigError naming the item and the accepted values."""
        given: dict[str, float] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in _ITEMS:
                raise ConfigError(f"emulate: {name!r} is not one of {', '.join(_ITEMS)}")
            if name in given:
                raise ConfigError(f"emulate: {name} is given twice")
            read, accepts = _ITEMS[name]
            try:
                given[name] = read(value)
            except (ValueError, OverflowError) as error:
                raise ConfigError(f"emulate: {name}={value} is not accepted; it takes {accepts}") from error
        return cls(**given)


class Shaper:
    """One direction. Times are s from any origin and must not decrease; equal random numbers give equal ones."""

    def __init__(self, emulation: Emulation, random: Random) -> None:
        self._emulation, self._random = emulation, random
        self._free_at = -math.inf  # when the last bit sent so far leaves the sender
        self._last_arrival = -math.inf

    def schedule(self, now: float, size: int) -> float:
        """Arrival time of a message of `size` bytes sent now; never before that of an earlier one."""
        network = self._emulation
        self._free_at = max(now, self._free_at) + size * 8 / network.rate
        jitter = network.jitter * (2 * self._random.random() - 1)
        arrival = self._free_at + max(0.0, network.rtt / 2 + jitter) + self._retransmission(size)
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival

    def _retransmission(self, size: int) -> float:
        """Delay in s by retransmissions: the timeout of RFC 6298, doubled at each loss of the same packet."""
        network = self._emulation
        if network.loss == 0.0:
            return 0.0
        packets = max(1, math.ceil(size / PACKET_BYTES))
        timeout = network.rtt + max(MIN_RETRANSMIT_S, 4 * network.jitter)
        lost = 1 - (1 - network.loss) ** packets
        waited = 0.0
        while self._random.random() < lost and waited < MAX_RETRANSMIT_S:
            waited += timeout
            timeout = min(2 * timeout, MAX_RETRANSMIT_S)
            lost = network.loss
        return waited


class _DelayLine:
    """What is in flight in one direction, in order, an end included."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper
        self._items: asyncio.Queue[tuple[float, int, Item]] = asyncio.Queue()  # when each arrives, its size, and itself
        self._size = 0
        self._arrived = asyncio.Event()

    async def put(self, item: Item) -> None:
        """Waits while too many bytes are in flight."""
        while self._size >= MAX_IN_FLIGHT:
            self._arrived.clear()
            await self._arrived.wait()
        size = len(item) if isinstance(item, bytes) else 0
        self._size += size
        self._items.put_nowait((self._shaper.schedule(asyncio.get_running_loop().time(), size), size, item))

    async def get(self) -> Item:
        """The next item, at its arrival time."""
        arrival, size, item = await self._items.get()
        await asyncio.sleep(arrival - asyncio.get_running_loop().time())
        self._size -= size
        self._arrived.set()
        return item


class EmulatedTransport:
    """A transport behind an emulated network; `emulated` makes it and runs what carries its messages."""

    def __init__(self, inner: Transport, emulation: Emulation) -> None:
        self._inner = inner
        self._out, self._in = (_DelayLine(Shaper(emulation, Random(way))) for way in ("up", "down"))
        self._ended = asyncio.Event()  # the close has been sent, or the connection broken

    async def send_bytes(self, data: bytes) -> None:
        if self._ended.is_set():
            raise TransportClosed(1006, "")
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

    async def carry_out(self) -> None:
        while not self._ended.is_set():
            item = await self._out.get()
            try:
                if isinstance(item, bytes):
                    await self._inner.send_bytes(item)
                elif isinstance(item, TransportClosed):
                    await self._inner.close(item.code, item.reason)
                    self._ended.set()
            except TransportClosed:
                self._ended.set()  # the other direction receives the reason

    async def carry_in(self) -> None:
        try:
            while True:
                await self._in.put(await self._inner.recv_bytes())
        except (TransportClosed, RemoteProtocolError) as end:
            await self._in.put(end)


@asynccontextmanager
async def emulated(inner: Transport, emulation: Emulation | None) -> AsyncIterator[Transport]:
    """`inner` behind the emulated network, or `inner` itself without one, as where the engine alone is emulated."""
    given = emulation or Emulation()
    if not (given.rtt or given.jitter or given.rate < math.inf or given.loss):
        yield inner
        return
    transport = EmulatedTransport(inner, given)
    async with asyncio.TaskGroup() as tasks:
        carrying = [tasks.create_task(transport.carry_out()), tasks.create_task(transport.carry_in())]
        try:
            yield transport
        finally:
            for task in carrying:
                task.cancel()
