"""The simulator itself: order, bandwidth, step times, several hosts and requests, addresses, determinism, radio."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation import Network, SimulatedRequest, Simulation
from lab.simulation.channel import FadingChannel, RadioParameters
from lab.simulation.clock import VirtualClock
from lab.simulation.network import SimulatedLink
from paceline.engine.base import Engine
from paceline.strategies.base import Side
from paceline.strategies.registry import STRATEGIES
from tests.strategies import oracle
from tests.strategies.cases import BRANCHES, EOS, MAX_TOKENS, SAMPLINGS, engines, job


def link(network: Network, seed: int = 0) -> tuple[VirtualClock, SimulatedLink]:
    clock = VirtualClock()
    return clock, SimulatedLink(clock, random.Random(seed), network)


def arrivals(network: Network, count: int, num_bytes: int = 10, seed: int = 0) -> list[tuple[float, int]]:
    """Times and numbers of messages that are sent at once."""
    clock, carrier = link(network, seed)
    found: list[tuple[float, int]] = []

    def deliver(number: int) -> Callable[[], None]:
        return lambda: found.append((clock.now, number))

    for number in range(count):
        carrier.carry("a", num_bytes, deliver(number))
    while not clock.idle:
        clock.advance()
    return found


# ---- links ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
def test_no_message_overtakes_another_however_much_the_delay_varies(seed: int) -> None:
    found = arrivals(Network((0.01, 1.0)), 50, seed=seed)
    assert [number for _, number in found] == list(range(50))
    times = [time for time, _ in found]
    assert times == sorted(times) and times[0] >= 0.01 and times[-1] <= 1.0


def test_reordering_loss_and_duplication_are_asked_for_by_name() -> None:
    numbers = [number for _, number in arrivals(Network((0.01, 1.0), reorders=True), 50)]
    assert sorted(numbers) == list(range(50)) != numbers
    lost = [number for _, number in arrivals(Network((0.0, 0.1), loss=0.5), 200)]
    assert 60 < len(lost) < 140 and lost == sorted(lost)
    twice = [number for _, number in arrivals(Network((0.0, 0.1), duplicate=0.5), 200)]
    assert 260 < len(twice) < 340 and set(twice) == set(range(200))


def test_each_direction_queues_for_its_own_bandwidth() -> None:
    clock, carrier = link(Network((0.5, 0.5), bandwidth=100.0))
    found: list[tuple[str, float]] = []
    for sender, num_bytes in (("a", 100), ("a", 50), ("b", 10)):
        carrier.carry(sender, num_bytes, lambda sender=sender: found.append((sender, clock.now)))  # type: ignore[misc]
    while not clock.idle:
        clock.advance()
    assert found == [("b", 0.6), ("a", 1.5), ("a", 2.0)]


@pytest.mark.parametrize("reorders", [False, True])
def test_a_link_in_order_delivers_nothing_of_an_earlier_connection(reorders: bool) -> None:
    clock, carrier = link(Network((1.0, 1.0), reorders=reorders))
    found: list[str] = []
    carrier.carry("a", 1, lambda: found.append("old"))
    carrier.cut()
    carrier.carry("a", 1, lambda: found.append("while it is cut"))
    carrier.mend()
    carrier.carry("a", 1, lambda: found.append("new"))
    while not clock.idle:
        clock.advance()
    assert found == (["old", "new"] if reorders else ["new"])


# ---- hosts ----------------------------------------------------------------------------------------------------------
def alone(side: Side) -> list[int]:
    return oracle.continued_alone(engines()[side], BRANCHES[side], [], SAMPLINGS["greedy"], MAX_TOKENS, EOS)


def test_a_forward_takes_the_time_of_its_rows() -> None:
    rows: list[int] = []

    def step_time(count: int) -> float:
        rows.append(count)
        return 1.0 + 0.5 * count

    request = job(STRATEGIES["autoregressive"], "device", SAMPLINGS["greedy"])
    by = {"device": engines()["device"]}  # one host suffices
    world = Simulation(request, by, forward={"device": step_time})
    assert world.run().tokens == alone("device")
    assert rows == [len(BRANCHES["device"][0].prompt), *[1] * (len(rows) - 1)] and not world.messages
    assert world.now == sum(1.0 + 0.5 * count for count in rows)
    constant = Simulation(request, by, forward={"device": 0.25})
    constant.run()
    assert constant.now == 0.25 * len(rows)


def several() -> dict[str, Engine]:
    return {"cloud": engines()["cloud"], "phone": engines()["device"], "laptop": engines()["device"]}


def request(name: str, front: str, device: str, start: float = 0.0) -> SimulatedRequest:
    """A request of one of several devices."""
    branches = {"cloud": BRANCHES["cloud"], device: BRANCHES["device"]}
    peers, sides = {"cloud": device, device: "cloud"}, dict[str, Side](phone="device", laptop="device")
    base = job(STRATEGIES[name], "cloud", SAMPLINGS["greedy"])
    return replace(base, front=front, branches=branches, sides=sides, peers=peers, start=start)


def test_requests_of_several_devices_share_the_engine_of_the_cloud() -> None:
    """Each with its own front, strategy and start; the cloud's steps hold rows of several of them."""
    requests = [
        request("aggregate", "phone", "phone"),
        request("aggregate", "cloud", "laptop", 0.05),
        request("autoregressive", "cloud", "phone", 0.1),
        request("lookup_tree", "laptop", "laptop"),
    ]
    network, slow = Network((0.01, 0.03)), Network((0.2, 0.4), bandwidth=50_000.0)
    world = Simulation(requests, several(), network=network, links={("laptop", "cloud"): slow})
    largest = 0

    def watch(world: Simulation) -> None:
        nonlocal largest
        largest = max(largest, world.hosts["cloud"].steps.last.sequences)

    world.run(watch)
    joint = oracle.REFERENCES["mixture"](engines(), BRANCHES, SAMPLINGS["greedy"], MAX_TOKENS, EOS)
    assert [answer.tokens for answer in world.answers] == [joint, joint, alone("cloud"), alone("device")]
    assert largest > len(BRANCHES["cloud"]), "nothing was batched across requests"
    pairs = {(sent.sender, sent.receiver) for sent in world.messages}
    assert pairs == {("phone", "cloud"), ("cloud", "phone"), ("laptop", "cloud"), ("cloud", "laptop")}


def test_a_cut_between_two_hosts_leaves_the_others_linked() -> None:
    requests = [request("aggregate", name, name) for name in ("phone", "laptop")]
    world = Simulation(requests, several(), network=Network((0.01, 0.03)))

    def cut(world: Simulation) -> None:
        if world.events == 1:
            world.cut("cloud", "laptop")

    world.run(cut)
    phone, laptop = world.answers
    assert phone.tokens == oracle.REFERENCES["mixture"](engines(), BRANCHES, SAMPLINGS["greedy"], MAX_TOKENS, EOS)
    assert laptop.tokens == alone("device")


# ---- the whole ------------------------------------------------------------------------------------------------------
def test_the_seed_decides_everything() -> None:
    def play(seed: int) -> object:
        network = Network((0.01, 0.2), bandwidth=20_000.0)
        world = Simulation(
            job(STRATEGIES["aggregate"], "cloud", SAMPLINGS["sampled"]), engines(), seed=seed, network=network
        )
        return world.run().tokens, world.now, world.messages

    assert play(1) == play(1) != play(2)


# ---- the radio channel: its rate against a number worked by hand, and messages against its blocks -------------------
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
