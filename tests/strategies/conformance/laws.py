"""Conformance laws: one function each, for any strategy. The tests of this folder apply them to every registered one.

A law takes the strategy and a manner of writing, plays simulated answers and compares their tokens with the plain,
synchronous reference of `tests.strategies.oracle`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.runtime.simulation import Network, SimulatedSession, Simulation
from paceline.strategies.base import SIDES, Branch, Cancelled, Emit, LinkLost, Side, other
from paceline.strategies.registry import STRATEGIES
from paceline.strategies.strategy import Strategy
from tests.strategies import oracle
from tests.strategies.cases import (
    BRANCHES,
    EOS,
    MAX_TOKENS,
    SAMPLINGS,
    Hand,
    Manner,
    engines,
    job,
    manners,
    without_documents,
)
from tests.strategies.conformance.worlds import SHORT, Flapping, changing_speeds, harsh

QUICK = 3  # seeds that also run in `make check`


def every_manner(*, with_peer: bool | None = None) -> pytest.MarkDecorator:
    """Parameters `strategy` and `manner`. with_peer: of both sides alone, or of one side alone."""
    found = {
        f"{strategy.name}, {name}": (strategy, manner)
        for strategy in STRATEGIES.values()
        if with_peer in (None, strategy.needs_peer)
        for name, manner in manners(strategy).items()
    }
    return pytest.mark.parametrize(("strategy", "manner"), list(found.values()), ids=list(found))


def every_seed(count: int) -> pytest.MarkDecorator:
    """Parameter `seeds`: the first few, and the rest, which are slow."""
    rest = pytest.param(range(QUICK, count), marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [range(QUICK), rest], ids=["first seeds", "further seeds"])


EVERY_FRONT = pytest.mark.parametrize("front", SIDES)
EVERY_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
EVERY_NETWORK = pytest.mark.parametrize(
    "reorders", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in order", "reordering"]
)


def reference(
    strategy: Strategy,
    front: Side,
    sampling: SamplingParams,
    manner: Manner,
    branches: Mapping[Side, tuple[Branch, ...]] = BRANCHES,
) -> list[int]:
    """The text that the strategy declares."""
    if strategy.text_of == "both":
        how = oracle.REFERENCES[manner.rule]
        return how(engines(), branches, sampling, MAX_TOKENS, EOS, rescoring=manner.rescoring)
    writer = front if strategy.text_of == "front" else "cloud"
    return alone(writer, sampling, manner, MAX_TOKENS, branches=branches)


def alone(
    side: Side,
    sampling: SamplingParams,
    manner: Manner,
    max_tokens: int,
    prefix: Iterable[int] = (),
    branches: Mapping[Side, tuple[Branch, ...]] = BRANCHES,
) -> list[int]:
    """The text of one side that continues this prefix by itself."""
    return oracle.continued_alone(
        engines()[side], branches[side], list(prefix), sampling, max_tokens, EOS, rescoring=manner.rescoring
    )


def together(answer: SimulatedSession) -> int:
    """Targets that were decided before the front was alone for good, or at all."""
    assert answer.finished is not None
    decided = len(answer.tokens) + (answer.finished.reason == "stop")
    return decided - int(answer.finished.stats.get("alone", 0.0))


def check_text(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, seeds: Iterable[int], *, reorders: bool
) -> None:
    """The text equals its reference, whatever the delays and the speeds."""
    expected = reference(strategy, front, sampling, manner)
    for seed in seeds:
        request = job(strategy, front, sampling, manner=manner)
        answer = harsh(seed, reorders=reorders).world(request, seed).run(changing_speeds if seed % 2 else None)
        assert answer.tokens == expected, f"seed {seed}"
        if request.config.table is not None:
            request.config.table.check()
        assert answer.finished is not None
        assert answer.finished.reason == ("length" if len(expected) == MAX_TOKENS else "stop")


def check_loss(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, network: Network, *, every: int = 6
) -> None:
    """A peer killed at any step leaves the prefix it took part in, and the front continues that alone.

    every: steps between two kills; the first one varies with the parameters.
    """

    def world() -> Simulation:
        return Simulation(job(strategy, front, sampling, manner=manner, max_tokens=SHORT), engines(), network=network)

    undisturbed = world()
    whole = undisturbed.run().tokens
    first = 1 + (random.Random(f"{manner} {front} {sampling}").randrange(every) if every > 1 else 0)
    alone_from: set[int] = set()
    for step in range(first, undisturbed.events, every):
        before: list[int] = []

        def kill(world: Simulation, step: int = step, before: list[int] = before) -> None:
            if world.events == step:
                before[:] = world.front.tokens
                world.cut(kill=other(front))

        answer = world().run(kill)
        prefix = together(answer) if strategy.needs_peer else 0
        if prefix >= len(whole):
            assert answer.tokens == whole
            continue
        alone_from.add(prefix)
        assert answer.tokens[: len(before)] == before and answer.tokens[:prefix] == whole[:prefix]
        assert answer.tokens == alone(front, sampling, manner, SHORT, whole[:prefix]), f"step {step}"
    assert every > 1 or strategy.text_of != "both" or len(alone_from) > 2


def check_flap(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, seeds: Iterable[int], *, reorders: bool
) -> None:
    """A link that is cut and mended at random ends in a whole answer."""
    for seed in seeds:
        world = harsh(seed, reorders=reorders).world(job(strategy, front, sampling, manner=manner), seed)
        answer = world.run(Flapping(seed))
        assert answer.finished is not None and answer.finished.reason in ("stop", "length")
        assert len(answer.tokens) == MAX_TOKENS or answer.finished.reason == "stop"
        if strategy.text_of == "front":
            assert answer.tokens == reference(strategy, front, sampling, manner), f"seed {seed}"


class CutAndMend:
    """Cuts the link and mends it at once, up to three times, where the front could not decide a token in between."""

    def __init__(self, seed: int) -> None:
        self.cuts = 0
        self._chance = random.Random(f"return {seed}")

    def __call__(self, world: Simulation) -> None:
        if self.cuts < 3 and self._chance.random() < 0.06:
            effects = world.front.preview(LinkLost())
            if not any(isinstance(effect, Emit) for effect in effects):
                self.cuts += 1
                world.cut()
                world.mend()


def check_return(strategy: Strategy, manner: Manner, front: Side, seeds: Iterable[int], network: Network) -> None:
    """A peer that is lost and back at once is taken in again, and the text is the undisturbed one."""
    sampling = SAMPLINGS["sampled"]
    expected = reference(strategy, front, sampling, manner)
    same = returned = 0
    for seed in seeds:
        request = job(strategy, front, sampling, manner=manner)
        slow_front = {front: 0.3, other(front): 0.01}
        world = Simulation(request, engines(), seed=seed, network=network, forward=slow_front)
        answer = world.run(CutAndMend(seed))
        assert answer.finished is not None
        if answer.finished.stats.get("alone", 0.0) == 0:
            assert answer.tokens == expected
            same += 1
        returned += world.session(other(front)).openings - 1
        assert together(answer) > 0
    assert returned > 1 and same > 0, (returned, same)


def check_cancel(strategy: Strategy, manner: Manner, front: Side, network: Network, *, every: int = 4) -> None:
    """An answer cancelled at any step is a prefix, and every sequence is released on both sides."""
    request = job(strategy, front, SAMPLINGS["greedy"], manner=manner, max_tokens=SHORT)
    undisturbed = Simulation(request, engines(), network=network)
    whole = undisturbed.run().tokens
    for step in range(2, undisturbed.events, every):

        def cancel(world: Simulation, step: int = step) -> None:
            if world.events == step:
                world.front.deliver_later(Cancelled())

        answer = Simulation(request, engines(), network=network).run(cancel)  # `run` asserts that nothing is left
        assert answer.finished is not None
        assert answer.tokens == whole[: len(answer.tokens)]


def check_alone(strategy: Strategy, manner: Manner, front: Side) -> None:
    """Without a link the front writes its own text."""
    sampling = SAMPLINGS["sampled"]
    world = Simulation(job(strategy, front, sampling, manner=manner), engines(), linked=False)
    assert world.run().tokens == alone(front, sampling, manner, MAX_TOKENS)


def check_lane_alone(strategy: Strategy, manner: Manner, front: Side) -> None:
    """A front that writes alone names itself as the lane where it reads a document, and no side where it reads none."""
    options = job(strategy, front, SAMPLINGS["greedy"], manner=manner).config.options
    for score, lane in ((0.5, front), (None, None)):
        hand = Hand(strategy.machine, front, front=True, has_peer=False, options=options)
        hand.begin(score)
        assert {emit.lane for emit in hand.emitted} == {lane}


def check_without_documents(
    strategy: Strategy, manner: Manner, front: Side, empty: Side, seeds: Iterable[int], *, reorders: bool
) -> None:
    """A side without documents decides nothing where the text is of both."""
    sampling = SAMPLINGS["sampled"]
    branches = dict(BRANCHES) | {empty: without_documents(BRANCHES[empty])}
    expected = reference(strategy, front, sampling, manner, branches)
    for seed in seeds:
        request = job(strategy, front, sampling, branches=branches, manner=manner)
        assert harsh(seed, reorders=reorders).world(request, seed).run().tokens == expected


def check_repeats(strategy: Strategy, manner: Manner, front: Side, *, reorders: bool) -> None:
    """The same seed gives the same tokens, messages and times; a preview of an event changes none of them."""

    def play(before: Callable[[Simulation], None] | None = None) -> tuple[Any, ...]:
        world = harsh(3, reorders=reorders).world(job(strategy, front, SAMPLINGS["sampled"], manner=manner), 3)
        return world.run(before).tokens, world.events, world.now, world.messages

    def look(world: Simulation) -> None:
        if world.events % 16 == 0:
            world.front.preview(LinkLost())

    assert play() == play() == play(look)
