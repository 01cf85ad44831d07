from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.runtime.link.emulation import Emulation, emulated
from paceline.runtime.link.transport import TransportClosed

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ---- parsing --------------------------------------------------------------------------------------------------------
def test_conditions_are_parsed_from_the_command_line() -> None:
    parsed = Emulation.parse("rtt=100ms, jitter=20ms,rate=10mbit,loss=1%,cut=5s+12s+never,seed=7")
    assert parsed == Emulation(rtt=0.1, jitter=0.02, rate=10e6, loss=0.01, cuts=(5.0, 12.0, math.inf), seed=7)
    assert Emulation.parse("rtt=.5s,loss=0.01,rate=500kbit") == Emulation(rtt=0.5, loss=0.01, rate=500e3)
    assert Emulation.parse("") == Emulation()
    assert Emulation.parse("forward=60ms,row=0.5ms") == Emulation(forward=0.06, row=0.0005)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rtt=fast", "rtt=fast is not accepted; it takes a time such as 100ms"),
        ("rate=10mb", "10mbit"),
        ("loss=1", "below 1"),
        ("cut=0s", "cut"),
        ("delay=5ms", "'delay' is not one of rtt, jitter, rate"),
        ("rtt=1ms,rtt=2ms", "twice"),
        ("trace=/nowhere.csv", "cannot be read"),
        ("forward=slow", "forward=slow is not accepted; it takes a time"),
    ],
)
def test_a_bad_option_is_named_with_the_accepted_values(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Emulation.parse(text)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["t,d,r"], "must begin with the line time,delay,rate"),
        (["time,delay,rate", "0,0.1,1000"], "two rows or more"),
        (["time,delay,rate", "1,0.1,1000", "2,0,1"], "rising from 0"),
        (["time,delay,rate", "0,0.1,1000", "1,x,1"], "line 3: three numbers"),
        (["time,delay,rate", "0,0.1,0"], "line 2: time and delay from 0"),
    ],
)
def test_an_invalid_trace_is_refused_with_its_line(tmp_path: Path, lines: list[str], why: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        Emulation.parse(f"trace={path}")


def test_a_trace_is_replayed_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,delay,rate\n0,0.1,8000\n10,0.5,80000\n20,0,1\n", encoding="utf-8")
    shaper = Emulation.parse(f"trace={path}").shaper("up")
    assert shaper.schedule(1.0, 1000) == pytest.approx(1 + 1 + 0.1)
    assert shaper.schedule(12.0, 1000) == pytest.approx(12 + 0.1 + 0.5)
    assert shaper.schedule(21.0, 1000) == pytest.approx(21 + 1 + 0.1)
    with pytest.raises(ConfigError, match="leave out rtt"):
        Emulation.parse(f"trace={path},rtt=1ms")


# ---- the pure part --------------------------------------------------------------------------------------------------
def test_each_direction_takes_half_a_round_trip_and_the_rate_is_shared_in_order() -> None:
    shaper = Emulation(rtt=0.1, rate=8000).shaper("up")
    assert shaper.schedule(0.0, 0) == 0.05
    assert shaper.schedule(0.0, 1000) == 1.05
    assert shaper.schedule(0.5, 500) == 1.55  # waits for the previous message
    assert shaper.schedule(9.0, 500) == 9.55


@untimed
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100_000)), min_size=2, max_size=50),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.integers(0, 3),
)
def test_order_is_kept_and_equal_seeds_give_equal_times(
    messages: list[tuple[float, int]], loss: float, seed: int
) -> None:
    emulation = Emulation(rtt=0.1, jitter=0.2, rate=1e6, loss=loss, seed=seed)
    runs: list[list[float]] = []
    for _ in range(2):
        shaper, now, arrivals = emulation.shaper("down", index=1), 0.0, []
        for pause, size in messages:
            now += pause
            arrivals.append(shaper.schedule(now, size))
            assert arrivals[-1] >= now
        runs.append(arrivals)
    assert runs[0] == runs[1] == sorted(runs[0])


def test_directions_links_and_seeds_have_independent_jitter() -> None:
    def arrivals(seed: int, index: int, direction: str) -> list[float]:
        shaper = Emulation(rtt=1, jitter=0.5, seed=seed).shaper(direction, index)  # type: ignore[arg-type]  # both below
        return [shaper.schedule(10.0 * i, 10) for i in range(5)]

    kinds = [arrivals(*kind) for kind in [(0, 0, "up"), (0, 0, "down"), (0, 1, "up"), (1, 0, "up")]]
    assert len({tuple(kind) for kind in kinds}) == 4


def test_a_loss_delays_by_the_retransmission() -> None:
    shaper = Emulation(rtt=0.1, loss=0.25, seed=3).shaper("up")
    waits = [round(shaper.schedule(1000.0 * i, 100) - 1000.0 * i - 0.05, 6) for i in range(4000)]
    assert set(waits) <= {round(0.3 * (2**losses - 1), 6) for losses in range(12)}
    lost = sum(wait > 0 for wait in waits) / len(waits)
    assert abs(lost - 0.25) < 0.03


def test_the_life_of_each_link_is_scripted() -> None:
    scripted = Emulation.parse("cut=5s+12s+never")
    assert [scripted.cut_after(index) for index in range(4)] == [5.0, 12.0, None, None]
    periodic = Emulation.parse("cut=30s")
    assert [periodic.cut_after(index) for index in range(3)] == [30.0, 30.0, 30.0]
    assert Emulation().cut_after(0) is None


# ---- in front of a transport ----------------------------------------------------------------------------------------
class FakeClock:
    """Virtual time that advances only when all tasks wait."""

    def __init__(self) -> None:
        self.time = 100.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self.time

    async def sleep_until(self, time: float) -> None:
        event = asyncio.Event()
        if time > self.time:
            self._sleepers.append((time, event))
            await event.wait()

    async def settle(self) -> None:
        """Run until every task waits."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def advance_to(self, time: float) -> None:
        await self.settle()
        while due := [entry for entry in self._sleepers if entry[0] <= time]:
            entry = min(due, key=lambda entry: entry[0])
            self._sleepers.remove(entry)
            self.time = max(self.time, entry[0])
            entry[1].set()
            await self.settle()
        self.time = time


class Wire:
    """A transport that records sent messages with their times and returns scripted ones."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.sent: list[tuple[float, object]] = []
        self.incoming: asyncio.Queue[bytes | TransportClosed] = asyncio.Queue()
        self.aborted = False
        self._now = now

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append((round(self._now(), 6), data))

    async def recv_bytes(self) -> bytes:
        item = await self.incoming.get()
        if isinstance(item, bytes):
            return item
        raise item

    async def close(self, code: int, reason: str) -> None:
        self.sent.append((round(self._now(), 6), (code, reason)))

    def abort(self) -> None:
        self.aborted = True


pytestmark = pytest.mark.anyio


async def test_messages_and_the_close_are_delayed_in_order() -> None:
    clock = FakeClock()
    wire = Wire(clock.now)
    async with emulated(wire, Emulation(rtt=2.0, rate=800), clock=clock) as transport:
        await transport.send_bytes(b"x" * 100)
        await transport.send_bytes(b"y" * 50)
        closing = asyncio.create_task(transport.close(4000, "bye"))
        await clock.advance_to(101.9)
        assert wire.sent == []
        await clock.advance_to(110.0)
        await closing
    assert wire.sent == [(102.0, b"x" * 100), (102.5, b"y" * 50), (102.5, (4000, "bye"))]


async def test_received_messages_and_the_end_are_delayed() -> None:
    clock = FakeClock()
    wire = Wire(clock.now)
    async with emulated(wire, Emulation(rtt=2.0), clock=clock) as transport:
        wire.incoming.put_nowait(b"one")
        wire.incoming.put_nowait(TransportClosed(4001, "over"))
        receiving = asyncio.create_task(transport.recv_bytes())
        await clock.advance_to(100.9)
        assert not receiving.done()
        await clock.advance_to(101.0)
        assert await receiving == b"one"
        with pytest.raises(TransportClosed) as caught:
            await transport.recv_bytes()
        assert (caught.value.code, caught.value.reason) == (4001, "over")


async def test_a_cut_drops_messages_in_flight() -> None:
    clock = FakeClock()
    wire = Wire(clock.now)
    async with emulated(wire, Emulation.parse("rtt=2s,cut=5s"), clock=clock) as transport:
        await clock.advance_to(104.5)
        wire.incoming.put_nowait(b"too late")
        await transport.send_bytes(b"too late")
        receiving = asyncio.create_task(transport.recv_bytes())
        await clock.advance_to(106.0)
        with pytest.raises(TransportClosed) as caught:
            await receiving
        assert caught.value.code == 1006
        with pytest.raises(TransportClosed):
            await transport.send_bytes(b"later still")
    assert wire.aborted
    assert wire.sent == []


async def test_a_sender_waits_when_too_many_bytes_are_in_flight() -> None:
    clock = FakeClock()
    wire = Wire(clock.now)
    async with emulated(wire, Emulation(rate=8e6), clock=clock) as transport:
        await transport.send_bytes(b"x" * 300_000)
        second = asyncio.create_task(transport.send_bytes(b"y"))
        await clock.advance_to(100.2)
        assert not second.done()
        await clock.advance_to(100.4)
        await second
    assert wire.sent[0] == (100.3, b"x" * 300_000)


async def test_no_emulation_is_the_transport_itself() -> None:
    wire = Wire(lambda: 0.0)
    for nothing in (None, Emulation(), Emulation.parse("forward=60ms,row=1ms,seed=2")):
        async with emulated(wire, nothing) as transport:
            assert transport is wire
