"""The radio channel of the simulator: its rate against a number worked by hand, and messages against its blocks."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.channel import FadingChannel, RadioParameters
from lab.simulation.clock import VirtualClock
from lab.simulation.network import Network, SimulatedLink


def test_the_mean_signal_is_that_of_the_link_budget() -> None:
    radio = RadioParameters(1e6)
    # 23.01 dBm - (128.1 + 37.6 log10 0.3) dB - (-174 + 60) dBm = 28.57 dB
    assert 10 * math.log10(radio.mean_snr) == pytest.approx(28.57, abs=0.01)
    assert radio.rate(1.0) * 8 == pytest.approx(1e6 * math.log2(1 + 10**2.857), rel=1e-3)
    assert radio.rate(0.0) == 0.0
    assert RadioParameters(2e6).mean_snr == pytest.approx(radio.mean_snr / 2), "noise grows with the band"
    with pytest.raises(ValueError, match="above 0"):
        RadioParameters(0.0)


@given(st.floats(0.0, 5.0), st.lists(st.floats(1e4, 3e5), min_size=1, max_size=4), st.integers(0, 5))
def test_a_message_takes_the_rate_of_every_block_that_it_is_sent_in(
    start: float, sizes: list[float], seed: int
) -> None:
    channel = FadingChannel(RadioParameters(1e6), seed=seed)
    end = channel.finish(start, sum(sizes))
    steps = 400
    width = (end - start) / steps
    carried = sum(channel.rate(start + (i + 0.5) * width) * width for i in range(steps))
    assert carried == pytest.approx(sum(sizes), rel=0.02)
    after = start
    for size in sizes:  # in pieces, one after another
        after = channel.finish(after, size)
    assert after == pytest.approx(end, rel=1e-9, abs=1e-9)


def test_gains_are_exponential_and_belong_to_the_seed_whatever_was_asked_first() -> None:
    radio = RadioParameters(1e6)
    late, early = FadingChannel(radio, seed=3), FadingChannel(radio, seed=3)
    backwards = [late.rate(0.5 * block) for block in reversed(range(50))]
    assert [early.rate(0.5 * block) for block in range(50)] == backwards[::-1]
    many = FadingChannel(radio)
    gains = [(2.0 ** (8.0 * many.rate(0.5 * block) / 1e6) - 1.0) / radio.mean_snr for block in range(4000)]
    assert statistics.fmean(gains) == pytest.approx(1.0, abs=0.06)
    assert statistics.fmean(gain < math.log(2.0) for gain in gains) == pytest.approx(0.5, abs=0.03)


def carried(sizes: list[int], gap: float) -> tuple[SimulatedLink, float, list[float]]:
    """A link with the channel upwards, over which messages were sent with a pause after each arrival."""
    clock = VirtualClock()
    channel = FadingChannel(RadioParameters(1e6), block_s=1e6)  # one block: a constant rate
    link = SimulatedLink(clock, random.Random(0), Network((0.005, 0.005), channels={"device": channel}))
    arrivals: list[float] = []

    def send(number: int) -> None:
        def arrived() -> None:
            arrivals.append(clock.now)
            if number + 1 < len(sizes):
                clock.after(gap, lambda: send(number + 1))

        link.carry("device", sizes[number], arrived)

    send(0)
    while not clock.idle:
        clock.advance()
    return link, channel.rate(0.0), arrivals


def test_a_sender_learns_the_rate_from_acknowledged_bytes_though_it_pauses() -> None:
    link, rate, arrivals = carried([60_000] * 12, gap=0.4)
    assert link.bandwidth("device") == pytest.approx(rate, rel=0.05)
    assert link.bandwidth("cloud") is None, "nothing is known of a direction without a limit"
    assert link.airtime["device"] == pytest.approx(12 * 60_000 / rate)
    assert arrivals[0] == pytest.approx(60_000 / rate + 0.005)
