"""What every strategy must stand, unasked: the text equals its reference whatever the network and the peer do."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from paceline.core.sampling import SamplingParams
from paceline.runtime.world import Host, Job, Network, World
from paceline.strategies.machine import SIDES, Cancelled, Side, Strategy, other
from paceline.strategies.registry import STRATEGIES
from tests.strategies import oracle
from tests.strategies.cases import BRANCHES, EOS, MAX_TOKENS, SAMPLINGS, engines, job, without_documents

EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
EVERY_FRONT = pytest.mark.parametrize("front", SIDES)
EVERY_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())


def reference(strategy: Strategy, front: Side, sampling: SamplingParams) -> list[int]:
    if strategy.reference == "mixture":
        return oracle.mixed(engines(), BRANCHES, sampling, MAX_TOKENS, EOS)
    return oracle.continued_alone(engines()[front], BRANCHES[front], [], sampling, MAX_TOKENS, EOS)


@dataclass(frozen=True, slots=True)
class Weather:
    network: Network
    decode: dict[Side, float]
    search: dict[Side, float]

    def world(self, this: Job, seed: int) -> World:
        return World(this, engines(), seed=seed, network=self.network, decode=self.decode, search=self.search)


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


@EVERY_STRATEGY
@EVERY_FRONT
@EVERY_SAMPLING
def test_text_equals_the_reference_in_random_interleavings(
    strategy: Strategy, front: Side, sampling: SamplingParams
) -> None:
    """2 fronts x 3 samplings x 70: more than 400 interleavings a strategy, of which 280 are sampled."""
    expected = reference(strategy, front, sampling)
    for seed in range(70):
        world = harsh(seed).world(job(strategy, front, sampling), seed)
        answer = world.run()
        assert answer.tokens == expected, f"seed {seed}"
        assert answer.finished is not None
        assert answer.finished.reason == ("length" if len(expected) == MAX_TOKENS else "stop")


@EVERY_STRATEGY
@EVERY_FRONT
@EVERY_SAMPLING
def test_a_peer_that_dies_at_any_step_leaves_the_prefix_and_the_front_goes_on(
    strategy: Strategy, front: Side, sampling: SamplingParams
) -> None:
    undisturbed = World(job(strategy, front, sampling), engines(), network=Network((0.03, 0.05)))
    undisturbed.run()
    for step in range(1, undisturbed.events, 2):
        told: list[int] = []

        def kill(world: World, step: int = step, told: list[int] = told) -> None:
            if world.events == step:
                told[:] = world.front.tokens
                world.cut(kill=other(front))

        world = World(job(strategy, front, sampling), engines(), network=Network((0.03, 0.05)))
        answer = world.run(kill)
        alone = oracle.continued_alone(engines()[front], BRANCHES[front], told, sampling, MAX_TOKENS, EOS)
        if answer.tokens != undisturbed.front.tokens or strategy.reference == "target":
            assert answer.tokens[: len(told)] == told
            # What was decided together before the loss was noticed stands; from there on the front is alone.
            assert answer.tokens in (alone, undisturbed.front.tokens)


@EVERY_STRATEGY
@EVERY_FRONT
def test_a_link_that_flaps_ends_in_a_whole_answer(strategy: Strategy, front: Side) -> None:
    sampling = SAMPLINGS["sampled"]
    for seed in range(60):
        chance = random.Random(f"flap {seed}")

        def flap(world: World, chance: random.Random = chance) -> None:
            if chance.random() < 0.02:
                world.cut()
            elif chance.random() < 0.05:
                world.mend()

        world = harsh(seed).world(job(strategy, front, sampling), seed)
        answer = world.run(flap)
        assert answer.finished is not None and answer.finished.reason in ("stop", "length")
        assert len(answer.tokens) == MAX_TOKENS or answer.finished.reason == "stop"


@EVERY_STRATEGY
@EVERY_FRONT
def test_cancelled_at_any_step_everything_is_released(strategy: Strategy, front: Side) -> None:
    sampling = SAMPLINGS["greedy"]
    undisturbed = World(job(strategy, front, sampling), engines(), network=Network((0.03, 0.05)))
    undisturbed.run()
    for step in range(2, undisturbed.events, 3):

        def cancel(world: World, step: int = step) -> None:
            if world.events == step:
                world.front.deliver_later(Cancelled())

        world = World(job(strategy, front, sampling), engines(), network=Network((0.03, 0.05)))
        answer = world.run(cancel)  # `run` itself asserts that no sequence is left on either side
        assert answer.finished is not None
        assert answer.tokens == undisturbed.front.tokens[: len(answer.tokens)]


@EVERY_STRATEGY
@EVERY_FRONT
def test_without_a_peer_the_front_answers_alone(strategy: Strategy, front: Side) -> None:
    sampling = SAMPLINGS["sampled"]
    world = World(job(strategy, front, sampling), engines(), linked=False)
    alone = oracle.continued_alone(engines()[front], BRANCHES[front], [], sampling, MAX_TOKENS, EOS)
    assert world.run().tokens == alone


@EVERY_STRATEGY
@EVERY_FRONT
@pytest.mark.parametrize("empty", SIDES)
def test_a_side_without_documents_has_no_say(strategy: Strategy, front: Side, empty: Side) -> None:
    """In a mixture the other side decides; the front's own text where no peer takes part."""
    sampling = SAMPLINGS["sampled"]
    branches = dict(BRANCHES) | {empty: without_documents(BRANCHES[empty])}
    if strategy.reference == "mixture":
        expected = oracle.mixed(engines(), branches, sampling, MAX_TOKENS, EOS)
    else:
        expected = oracle.continued_alone(engines()[front], branches[front], [], sampling, MAX_TOKENS, EOS)
    for seed in range(20):
        this = job(strategy, front, sampling, branches=branches)
        assert harsh(seed).world(this, seed).run().tokens == expected


@EVERY_STRATEGY
@EVERY_FRONT
def test_a_run_repeats_exactly(strategy: Strategy, front: Side) -> None:
    def play() -> tuple[list[int], int, float, dict[str, int]]:
        world = harsh(3).world(job(strategy, front, SAMPLINGS["sampled"]), 3)
        host: Host = world.run()
        return host.tokens, world.events, world.now, world.sent

    assert play() == play()
