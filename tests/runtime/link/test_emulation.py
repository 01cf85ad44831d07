"""The setting `emulate`, the times of an emulated network, and a transport behind one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.runtime.link.emulation import MAX_IN_FLIGHT, Emulation, Shaper, emulated
from paceline.runtime.link.transport import TransportClosed
from tests.runtime.link.test_connection import pipes

pytestmark = pytest.mark.anyio

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_conditions_are_parsed_from_the_setting() -> None:
    parsed = Emulation.parse("rtt=100ms, jitter=20ms,rate=10mbit,loss=1%")
    assert parsed == Emulation(rtt=0.1, jitter=0.02, rate=10e6, loss=0.01)
    assert Emulation.parse("rtt=.5s,loss=0.01,rate=500kbit") == Emulation(rtt=0.5, loss=0.01, rate=500e3)
    assert Emulation.parse("") == Emulation()
    assert Emulation.parse("forward=60ms,row=0.5ms") == Emulation(forward=0.06, row=0.0005)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rtt=fast", "rtt=fast is not accepted; it takes a time such as 100ms"),
        ("rate=10mb", "10mbit"),
        ("rate=0", "10mbit"),
        ("loss=1", "below 1"),
        ("delay=5ms", "'delay' is not one of rtt, jitter, rate"),
        ("rtt=1ms,rtt=2ms", "twice"),
        ("forward=slow", "forward=slow is not accepted; it takes a time"),
    ],
)
def test_a_bad_item_is_named_with_the_accepted_values(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Emulation.parse(text)


def shaper(emulation: Emulation, seed: int = 0) -> Shaper:
    return Shaper(emulation, Random(seed))


def test_each_direction_takes_half_a_round_trip_and_the_rate_is_shared_in_order() -> None:
    way = shaper(Emulation(rtt=0.1, rate=8000))
    assert way.schedule(0.0, 0) == 0.05
    assert way.schedule(0.0, 1000) == 1.05
    assert way.schedule(0.5, 500) == 1.55  # waits for the previous message
    assert way.schedule(9.0, 500) == 9.55


@untimed
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100_000)), min_size=2, max_size=50),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.integers(0, 3),
)
def test_order_is_kept_and_equal_seeds_give_equal_times(
    messages: list[tuple[float, int]], loss: float, seed: int
) -> None:
    runs: list[list[float]] = []
    for _ in range(2):
        way, now, arrivals = shaper(Emulation(rtt=0.1, jitter=0.2, rate=1e6, loss=loss), seed), 0.0, []
        for pause, size in messages:
            now += pause
            arrivals.append(way.schedule(now, size))
            assert arrivals[-1] >= now
        runs.append(arrivals)
    assert runs[0] == runs[1] == sorted(runs[0])


def test_a_loss_delays_by_the_retransmission() -> None:
    way = shaper(Emulation(rtt=0.1, loss=0.25), 3)
    waits = [round(way.schedule(1000.0 * i, 100) - 1000.0 * i - 0.05, 6) for i in range(4000)]
    assert set(waits) <= {round(0.3 * (2**losses - 1), 6) for losses in range(12)}
    lost = sum(wait > 0 for wait in waits) / len(waits)
    assert abs(lost - 0.25) < 0.03


# ---- in front of a transport ----------------------------------------------------------------------------------------
async def test_messages_and_the_close_are_delayed_in_order() -> None:
    wire, other = pipes()
    async with emulated(wire, Emulation(rtt=0.02, rate=1e6)) as transport:
        await transport.send_bytes(b"x" * 100)
        await transport.send_bytes(b"y" * 50)
        assert wire.sent == []
        await transport.close(4000, "bye")
    assert wire.sent == [b"x" * 100, b"y" * 50] and wire.said_goodbye == (4000, "bye")
    *_, last = (other.incoming.get_nowait() for _ in range(3))
    assert isinstance(last, TransportClosed), "behind them"


async def test_a_sender_waits_while_too_many_bytes_are_in_flight() -> None:
    wire, _ = pipes()
    async with emulated(wire, Emulation(rate=80e6)) as transport:
        await transport.send_bytes(b"x" * MAX_IN_FLIGHT)
        await transport.send_bytes(b"y")
        assert wire.sent == [b"x" * MAX_IN_FLIGHT], "the first one has arrived when the second is taken"


async def test_no_emulation_is_the_transport_itself() -> None:
    wire, _ = pipes()
    for nothing in (None, Emulation(), Emulation.parse("forward=60ms,row=1ms")):
        async with emulated(wire, nothing) as transport:
            assert transport is wire
