"""The simulator itself: order, bandwidth, step times, several hosts and requests, addresses, determinism."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from lab.simulation import Network, SimulatedRequest, Simulation
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
