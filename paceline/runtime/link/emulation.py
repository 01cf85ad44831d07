"""Network emulation as a pure function of time: `rtt=100ms,jitter=20ms,rate=10mbit,loss=0.01`, the setting `emulate`.

The option also sets a slower engine (`forward=60ms,row=0.5ms`), see `engine.base.delay_forwards`.

Models one direction of a reliable, ordered stream such as TCP: a lost packet delays itself and all later ones until its
retransmission. Knows no clock, no socket and no event loop; the same seed gives the same delays. Not modelled: slow
start, congestion, packets of other connections.
"""

from __future__ import annotations

import asyncio
import csv
import math
import re
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal, Protocol, TypeVar

from paceline.errors import ConfigError, RemoteProtocolError
from paceline.runtime.link.transport import Transport, TransportClosed

T = TypeVar("T")
Direction = Literal["up", "down"]

PACKET_BYTES = 1448  # an Ethernet payload of 1500 bytes less the headers of IP and TCP with timestamps
MIN_RETRANSMIT_S = 0.2  # Linux's TCP_RTO_MIN; RFC 6298 has 1 s
MAX_RETRANSMIT_S = 60.0

_TIME = "a time such as 100ms or 0.1s"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-z]*)")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Network conditions from `time` on."""

    time: float  # s since the link began
    delay: float  # s, one way
    rate: float  # bit/s


@dataclass(frozen=True, slots=True)
class Emulation:
    """Conditions of a link, the same in both directions. Set them on one side only: those of two sides add up.

    `forward` and `row` are for this side's engine: minimum time of a forward, and for each further row with logits.
    """

    rtt: float = 0.0  # s
    jitter: float = 0.0  # s: each direction's delay is rtt / 2, plus or minus up to this
    rate: float = math.inf  # bit/s in each direction
    loss: float = 0.0  # probability that a packet is lost
    cuts: tuple[float, ...] = ()  # s until the first link is cut, the second, …; the last applies to all later links
    trace: tuple[TraceRow, ...] = field(default=())  # replaces rtt and rate; repeats at its end
    seed: int = 0
    forward: float = 0.0  # s
    row: float = 0.0  # s

    @classmethod
    def parse(cls, text: str) -> Emulation:
        """Parse the command-line option. Raises ConfigError naming the option and the accepted values.

        `cut=30s` cuts every link after 30 s; `cut=5s+12s+never` the first after 5 s, the second after 12 s, no other.
        """
        options = _Options(text)
        emulation = cls(
            rtt=options.take("rtt", _seconds, _TIME, 0.0),
            jitter=options.take("jitter", _seconds, _TIME, 0.0),
            rate=options.take("rate", _rate, "bits per second such as 10mbit or 500kbit", math.inf),
            loss=options.take("loss", _probability, "a probability such as 0.01 or 1%, below 1", 0.0),
            cuts=options.take("cut", _cuts, "times such as 30s, or 5s+12s+never for one link after another", ()),
            trace=options.take("trace", _trace, "a CSV file with the columns time,delay,rate", ()),
            seed=options.take("seed", int, "a whole number", 0),
            forward=options.take("forward", _seconds, _TIME, 0.0),
            row=options.take("row", _seconds, _TIME, 0.0),
        )
        options.finish()
        if emulation.trace and (emulation.rtt or emulation.rate < math.inf):
            raise ConfigError("emulate: trace brings its own delay and rate; leave out rtt and rate")
        return emulation

    @property
    def has_link(self) -> bool:
        """True if a link is emulated, not only the engine."""
        return bool(self.rtt or self.jitter or self.rate < math.inf or self.loss or self.cuts or self.trace)

    def cut_after(self, index: int) -> float | None:
        """Time in s until the link with this number, from 0, is cut; None: never."""
        if not self.cuts:
            return None
        life = self.cuts[min(index, len(self.cuts) - 1)]
        return None if math.isinf(life) else life

    def shaper(self, direction: Direction, index: int = 0) -> Shaper:
        """A shaper for one direction of the link with this number."""
        return Shaper(self, Random(f"{self.seed}/{index}/{direction}"))


class Shaper:
    """One direction of one link. Times are s since the link began and must not decrease."""

    def __init__(self, emulation: Emulation, random: Random) -> None:
        self._emulation = emulation
        self._random = random
        self._free_at = 0.0  # when the last bit sent so far leaves the sender
        self._last_arrival = 0.0

    def schedule(self, now: float, size: int) -> float:
        """Arrival time of a message of `size` bytes sent now; never before that of an earlier one."""
        delay, rate = self._conditions(now)
        self._free_at = max(now, self._free_at) + size * 8 / rate
        jitter = self._emulation.jitter * (2 * self._random.random() - 1)
        arrival = self._free_at + max(0.0, delay + jitter) + self._retransmission(size, delay)
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival

    def _conditions(self, now: float) -> tuple[float, float]:
        trace = self._emulation.trace
        if not trace:
            return self._emulation.rtt / 2, self._emulation.rate
        length = trace[-1].time  # the last row only marks the end of the trace
        place = bisect_right(trace, now % length, key=lambda row: row.time) - 1
        return trace[place].delay, trace[place].rate

    def _retransmission(self, size: int, delay: float) -> float:
        """Delay in s by retransmissions: the timeout of RFC 6298, doubled at each loss of the same packet."""
        loss = self._emulation.loss
        if loss == 0.0:
            return 0.0
        packets = max(1, math.ceil(size / PACKET_BYTES))
        timeout = 2 * delay + max(MIN_RETRANSMIT_S, 4 * self._emulation.jitter)
        lost = 1 - (1 - loss) ** packets
        waited = 0.0
        while self._random.random() < lost and waited < MAX_RETRANSMIT_S:
            waited += timeout
            timeout = min(2 * timeout, MAX_RETRANSMIT_S)
            lost = loss
        return waited


class _Options:
    """Items of `name=value,name=value`."""

    def __init__(self, text: str) -> None:
        self._given: dict[str, str] = {}
        self._known: list[str] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            if name in self._given:
                raise ConfigError(f"emulate: {name} is given twice")
            self._given[name] = value

    def take(self, name: str, parse: Callable[[str], T], accepts: str, default: T) -> T:
        self._known.append(name)
        if name not in self._given:
            return default
        value = self._given.pop(name)
        try:
            return parse(value)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"emulate: {name}={value} is not accepted; it takes {accepts}") from error

    def finish(self) -> None:
        for name in self._given:
            raise ConfigError(f"emulate: {name!r} is not one of {', '.join(self._known)}")


def _quantity(text: str, units: dict[str, float]) -> float:
    match = _NUMBER.fullmatch(text.lower())
    if match is None or match[2] not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2]]


def _seconds(text: str) -> float:
    return _quantity(text, _UNITS)


def _rate(text: str) -> float:
    rate = _quantity(text, _RATES)
    if rate < 1:
        raise ValueError(text)
    return rate


def _probability(text: str) -> float:
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value < 1:
        raise ValueError(text)
    return value


def _cuts(text: str) -> tuple[float, ...]:
    lives = tuple(math.inf if part == "never" else _seconds(part) for part in text.split("+"))
    if min(lives) <= 0:
        raise ValueError(text)
    return lives


def _trace(text: str) -> tuple[TraceRow, ...]:
    """Read a CSV file with the columns of TraceRow. Raises ConfigError naming file and line."""
    path = Path(text).expanduser()
    names = [column.name for column in fields(TraceRow)]
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.DictReader(file)
            if lines.fieldnames != names:
                raise ConfigError(f"emulate: {path} must begin with the line {','.join(names)}")
            rows = tuple(_trace_row(path, number, line) for number, line in enumerate(lines, 2))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"emulate: the trace {path} cannot be read: {error}") from error
    _check_times(path, rows)
    return rows


def _trace_row(path: Path, number: int, line: dict[str, str]) -> TraceRow:
    try:
        row = TraceRow(time=float(line["time"]), delay=float(line["delay"]), rate=float(line["rate"]))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"emulate: {path}, line {number}: three numbers are needed, s, s and bit/s") from error
    if not (0 <= row.time < math.inf and 0 <= row.delay < math.inf and row.rate >= 1):
        raise ConfigError(f"emulate: {path}, line {number}: time and delay from 0 on, rate from 1 bit/s")
    return row


def _check_times(path: Path, rows: Sequence[TraceRow]) -> None:
    rising = all(before.time < after.time for before, after in pairwise(rows))
    if len(rows) < 2 or rows[0].time != 0 or not rising:
        raise ConfigError(f"emulate: {path} needs two rows or more, times rising from 0; the last ends the trace")


# An emulated network between a link and its transport. `Shaper` computes arrival times; `EmulatedTransport` waits.
# Order is kept in each direction, a close included.


MAX_IN_FLIGHT = 262_144  # bytes; then the sender waits, as for a full socket
ABNORMAL = 1006  # RFC 6455: the connection ended without a close frame

Item = bytes | TransportClosed | RemoteProtocolError  # a message, or the end of the stream


class Clock(Protocol):
    """Time in s from any origin."""

    def now(self) -> float: ...

    async def sleep_until(self, time: float) -> None: ...


class LoopClock:
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
            await self._in.break_off(TransportClosed(ABNORMAL, "cut by emulate"))


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
