"""Joint answers on two engines that are both short of KV memory, in virtual time: none blocks another."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest

from lab.simulation import Network, SimulatedRequest, Simulation
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.runtime.resources import claim
from paceline.strategies.base import SIDES, Cancelled, Side, other
from paceline.strategies.registry import STRATEGIES
from tests.strategies import oracle
from tests.strategies.cases import BRANCHES, EOS, MAX_TOKENS, SAMPLINGS, job

CAPACITY: dict[Side, int] = {"cloud": 400, "device": 200}  # one answer fits on each side, two do not
SPREAD: dict[Side, float] = {"cloud": 0.3, "device": 0.5}
SLOW = pytest.mark.slow
NEAR, FAR = Network((0.02, 0.03)), Network((0.2, 0.4))


def engines(short: Collection[Side]) -> dict[Side, Engine]:
    return {
        side: FakeEngine(1, spread=SPREAD[side], capacity_rows=CAPACITY[side] if side in short else None)
        for side in SIDES
    }


def sampling(number: int) -> SamplingParams:
    return replace(SAMPLINGS["sampled"], seed=number)


def request(number: int, front: Side) -> SimulatedRequest:
    claims: dict[str, int] = {}
    for side in SIDES:
        share = claim(CAPACITY[side], 1, [len(branch.prompt) for branch in BRANCHES[side]], MAX_TOKENS)
        assert share is not None and share.tokens == MAX_TOKENS and share.drafts
        claims[side] = share.rows
    return replace(job(STRATEGIES["aggregate"], front, sampling(number)), claims=claims)


def world(fronts: list[Side], network: Network, short: Collection[Side] = SIDES) -> Simulation:
    """Answers that begin together."""
    requests = [request(number, front) for number, front in enumerate(fronts)]
    return Simulation(requests, engines(short), network=network)


@cache
def text(number: int) -> list[int]:
    """Wherever its client is, and however many others there are."""
    return oracle.REFERENCES["mixture"](engines(()), BRANCHES, sampling(number), MAX_TOKENS, EOS)


@pytest.mark.parametrize(("count", "network"), [(2, FAR), (6, NEAR), pytest.param(6, FAR, marks=SLOW)])
def test_joint_answers_on_two_short_engines_all_end_with_their_texts(count: int, network: Network) -> None:
    short = world([SIDES[number % 2] for number in range(count)], network)
    short.run()
    assert [answer.tokens for answer in short.answers] == [*map(text, range(count))]
    if network is NEAR:
        assert short.now < count, "each takes a third of a second: none waited for a stalled one"


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_joint_answers_on_one_short_engine_all_end_with_their_texts(side: Side) -> None:
    short = world([SIDES[number % 2] for number in range(4)], NEAR, (side,))
    short.run()
    assert [answer.tokens for answer in short.answers] == [*map(text, range(4))]


def test_answers_that_are_cancelled_leave_their_memory_to_the_others() -> None:
    chance = random.Random(0)
    short = world([SIDES[number % 2] for number in range(6)], NEAR)
    cancelled: set[int] = set()

    def cancel(world: Simulation) -> None:
        if chance.random() < 0.02 and len(cancelled) < 4:
            number = chance.randrange(6)
            cancelled.add(number)
            world.answers[number].deliver(Cancelled("cancelled"))

    short.run(cancel)
    assert cancelled
    for number, answer in enumerate(short.answers):
        whole = text(number)
        assert answer.tokens == whole[: len(answer.tokens)] and (number in cancelled or answer.tokens == whole)


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "cut"])
@pytest.mark.parametrize("front", ["cloud", pytest.param("device", marks=SLOW)])
def test_answers_whose_peer_is_lost_go_on_alone_in_the_memory_they_have(front: Side, kill: bool) -> None:
    """Whether their peer held rows, was waiting for them, or had been preempted."""
    for event in (30, 200):
        short = world([front] * 4, NEAR)

        def lose(world: Simulation, event: int = event) -> None:
            if world.events == event:
                world.cut(kill=other(front) if kill else None)

        short.run(lose)
        for number, answer in enumerate(short.answers):
            pairs = zip(answer.tokens, text(number), strict=False)
            together = next((i for i, (ours, joint) in enumerate(pairs) if ours != joint), len(text(number)))
            assert answer.tokens == oracle.continued_alone(
                engines(())[front], BRANCHES[front], answer.tokens[:together], sampling(number), MAX_TOKENS, EOS
            )
