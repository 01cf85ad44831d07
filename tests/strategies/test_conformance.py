"""What every strategy must stand, unasked: the text equals its reference whatever the network and the peer do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.runtime.simulator import Network, SimulatedRequest, SimulatedSide, Simulation
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import SIDES, Branch, Cancelled, Side, other
from paceline.strategies.registry import STRATEGIES
from paceline.strategies.strategy import Strategy
from tests.strategies import oracle
from tests.strategies.cases import (
    BRANCHES,
    EOS,
    MANNERS,
    MAX_TOKENS,
    SAMPLINGS,
    Manner,
    engines,
    job,
    manners,
    without_documents,
)

EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
EVERY_MANNER = pytest.mark.parametrize(
    ("strategy", "manner"),
    [(strategy, manner) for strategy in STRATEGIES.values() for manner in manners(strategy).values()],
    ids=[f"{strategy.name}, {name}" for strategy in STRATEGIES.values() for name in manners(strategy)],
)
EVERY_FRONT = pytest.mark.parametrize("front", SIDES)
EVERY_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())


SHORT = 10  # tokens, where every step is disturbed once


def reference(
    strategy: Strategy,
    front: Side,
    sampling: SamplingParams,
    manner: Manner,
    branches: Mapping[Side, tuple[Branch, ...]] = BRANCHES,
) -> list[int]:
    if strategy.text_of == "both":
        how = oracle.REFERENCES[manner.rule]
        return how(engines(), branches, sampling, MAX_TOKENS, EOS, rescoring=manner.rescoring)
    return oracle.continued_alone(
        engines()[front], branches[front], [], sampling, MAX_TOKENS, EOS, rescoring=manner.rescoring
    )


def together(answer: SimulatedSide) -> int:
    """How many targets were decided before the front was alone for good, or at all."""
    assert answer.finished is not None
    decided = len(answer.tokens) + (answer.finished.reason == "stop")
    return decided - int(answer.finished.stats.get("alone", 0.0))


@dataclass(frozen=True, slots=True)
class Weather:
    network: Network
    decode: dict[Side, float]
    search: dict[Side, float]

    def world(self, this: SimulatedRequest, seed: int) -> Simulation:
        return Simulation(this, engines(), seed=seed, network=self.network, decode=self.decode, search=self.search)


def harsh(seed: int) -> Weather:
    """Different for every seed: delays up to a second, loss, duplicates, slow engines, slow searches."""
    chance = random.Random(f"harsh {seed}")
    slowest = chance.choice((0.0, 0.02, 0.3, 1.0))
    network = Network((slowest * chance.random(), slowest), chance.choice((0.0, 0.1, 0.3)), chance.choice((0.0, 0.4)))
    decode: dict[Side, float] = {
        "cloud": chance.choice((0.001, 0.02, 0.2)),
        "device": chance.choice((0.001, 0.06, 0.2)),
    }
    search: dict[Side, float] = {side: chance.choice((0.0, 0.1, 2.0)) for side in SIDES}
    return Weather(network, decode, search)


def changing_speeds(world: Simulation) -> None:
    """Every now and then each side computes as fast as the other did."""
    if world.events % 40 == 0:
        cloud, device = world.hosts["cloud"], world.hosts["device"]
        cloud.decode, device.decode = device.decode, cloud.decode


@EVERY_MANNER
@EVERY_FRONT
@EVERY_SAMPLING
def test_text_equals_the_reference_in_random_interleavings(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams
) -> None:
    """2 fronts x 3 samplings x 10 in each manner: 540 interleavings of `aggregate`, of which 360 are sampled."""
    expected = reference(strategy, front, sampling, manner)
    for seed in range(10 if strategy.needs_peer else 70):
        this = job(strategy, front, sampling, manner=manner)
        answer = harsh(seed).world(this, seed).run(changing_speeds if seed % 2 else None)
        assert answer.tokens == expected, f"seed {seed}"
        if this.task.table is not None:
            this.task.table.check()
        assert answer.finished is not None
        assert answer.finished.reason == ("length" if len(expected) == MAX_TOKENS else "stop")


@EVERY_FRONT
@EVERY_SAMPLING
def test_the_decision_goes_to_and_fro_and_changes_no_token(front: Side, sampling: SamplingParams) -> None:
    """Speeds that change places make it worth while; every link is long."""
    strategy = STRATEGIES["aggregate"]
    handed: dict[Side, float] = dict.fromkeys(SIDES, 0.0)
    for manner in MANNERS.values():
        if manner.private and manner.rule != "coin":
            continue
        expected = reference(strategy, front, sampling, manner)
        for seed in range(3):
            world = Simulation(
                job(strategy, front, sampling, manner=manner),
                engines(),
                seed=seed,
                network=Network((0.05, 0.15), 0.1 * (seed == 2)),
                decode={"cloud": 0.4, "device": 0.01},
            )
            assert world.run(changing_speeds).tokens == expected
            for side, host in world.hosts.items():
                if host.finished is not None:
                    handed[side] += host.finished.stats["handovers"]
    assert handed["device"] >= 3 and handed["cloud"] >= 1, handed


@EVERY_MANNER
@EVERY_FRONT
@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["sampled"]], ids=["greedy", "sampled"])
def test_a_peer_lost_for_good_at_any_step_leaves_the_prefix_and_the_front_goes_on(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams
) -> None:
    """At every sixth step, each combination at others; at every step in one manner of trees."""
    network = Network((0.03, 0.05))

    def world() -> Simulation:
        return Simulation(job(strategy, front, sampling, manner=manner, max_tokens=SHORT), engines(), network=network)

    undisturbed = world()
    undisturbed.run()
    whole = undisturbed.front.tokens
    every = manner == Manner() and sampling.temperature == 1.0
    offset = random.Random(f"{manner} {front} {sampling}").randrange(6)
    alone_from: set[int] = set()
    for step in range(1 + offset * (not every), undisturbed.events, 1 if every else 6):
        told: list[int] = []

        def kill(world: Simulation, step: int = step, told: list[int] = told) -> None:
            if world.events == step:
                told[:] = world.front.tokens
                world.cut(kill=other(front))

        answer = world().run(kill)
        prefix = together(answer) if strategy.needs_peer else 0
        if prefix >= len(whole):
            assert answer.tokens == whole
            continue
        alone_from.add(prefix)
        assert answer.tokens[: len(told)] == told and answer.tokens[:prefix] == whole[:prefix]
        alone = oracle.continued_alone(
            engines()[front], BRANCHES[front], whole[:prefix], sampling, SHORT, EOS, rescoring=manner.rescoring
        )
        assert answer.tokens == alone, f"step {step}"
    assert not every or not strategy.needs_peer or len(alone_from) > 2


@EVERY_MANNER
@EVERY_FRONT
def test_a_link_that_flaps_ends_in_a_whole_answer(strategy: Strategy, manner: Manner, front: Side) -> None:
    sampling = SAMPLINGS["sampled"]
    for seed in range(12):
        chance = random.Random(f"flap {seed}")

        def flap(world: Simulation, chance: random.Random = chance) -> None:
            if chance.random() < 0.02:
                world.cut()
            elif chance.random() < 0.05:
                world.mend()

        world = harsh(seed).world(job(strategy, front, sampling, manner=manner), seed)
        answer = world.run(flap)
        assert answer.finished is not None and answer.finished.reason in ("stop", "length")
        assert len(answer.tokens) == MAX_TOKENS or answer.finished.reason == "stop"


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS.keys())
@EVERY_FRONT
def test_a_peer_that_returns_is_taken_in_again_and_the_text_stays(manner: Manner, front: Side) -> None:
    """Cut and mended at once, over and over, while the front could not go on alone: the text is the undisturbed one."""
    strategy, sampling = STRATEGIES["aggregate"], SAMPLINGS["sampled"]
    expected = reference(strategy, front, sampling, manner)
    same = returned = 0
    for seed in range(6):
        chance = random.Random(f"return {seed}")

        cuts: list[float] = []

        def break_and_heal(world: Simulation, chance: random.Random = chance, cuts: list[float] = cuts) -> None:
            machine = None if world.front._driver is None else world.front._driver._machine
            assert isinstance(machine, Aggregate)
            if machine._paths.head.own_dist is None and len(cuts) < 3 and chance.random() < 0.06:
                cuts.append(world.now)
                world.cut()
                world.mend()

        slow: dict[Side, float] = {front: 0.3, other(front): 0.01}
        this = job(strategy, front, sampling, manner=manner)
        world = Simulation(this, engines(), seed=seed, network=Network((0.03, 0.08)), decode=slow)
        answer = world.run(break_and_heal)
        assert answer.finished is not None
        if answer.finished.stats["alone"] == 0:
            assert answer.tokens == expected
            same += 1
        returned += world.hosts[other(front)]._generation - 1
        assert together(answer) > 0
    assert returned > 3 and same > 0, (returned, same)


@EVERY_MANNER
@EVERY_FRONT
def test_cancelled_at_any_step_everything_is_released(strategy: Strategy, manner: Manner, front: Side) -> None:
    sampling = SAMPLINGS["greedy"]
    this = job(strategy, front, sampling, manner=manner, max_tokens=SHORT)
    undisturbed = Simulation(this, engines(), network=Network((0.03, 0.05)))
    undisturbed.run()
    for step in range(2, undisturbed.events, 4):

        def cancel(world: Simulation, step: int = step) -> None:
            if world.events == step:
                world.front.deliver_later(Cancelled())

        world = Simulation(this, engines(), network=Network((0.03, 0.05)))
        answer = world.run(cancel)  # `run` itself asserts that no sequence is left on either side
        assert answer.finished is not None
        assert answer.tokens == undisturbed.front.tokens[: len(answer.tokens)]


@EVERY_MANNER
@EVERY_FRONT
def test_without_a_peer_the_front_answers_alone(strategy: Strategy, manner: Manner, front: Side) -> None:
    sampling = SAMPLINGS["sampled"]
    world = Simulation(job(strategy, front, sampling, manner=manner), engines(), linked=False)
    alone = oracle.continued_alone(
        engines()[front], BRANCHES[front], [], sampling, MAX_TOKENS, EOS, rescoring=manner.rescoring
    )
    assert world.run().tokens == alone


@EVERY_MANNER
@EVERY_FRONT
@pytest.mark.parametrize("empty", SIDES)
def test_a_side_without_documents_has_no_say(strategy: Strategy, manner: Manner, front: Side, empty: Side) -> None:
    """In a mixture the other side decides; the front's own text where no peer takes part."""
    sampling = SAMPLINGS["sampled"]
    branches = dict(BRANCHES) | {empty: without_documents(BRANCHES[empty])}
    expected = reference(strategy, front, sampling, manner, branches)
    for seed in range(5):
        this = job(strategy, front, sampling, branches=branches, manner=manner)
        assert harsh(seed).world(this, seed).run().tokens == expected


@EVERY_MANNER
@EVERY_FRONT
def test_a_run_repeats_exactly(strategy: Strategy, manner: Manner, front: Side) -> None:
    def play() -> tuple[list[int], int, float, dict[str, int]]:
        world = harsh(3).world(job(strategy, front, SAMPLINGS["sampled"], manner=manner), 3)
        host: SimulatedSide = world.run()
        return host.tokens, world.events, world.now, world.sent

    assert play() == play()
