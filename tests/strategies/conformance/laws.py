"""Conformance laws: one function each, for any strategy. The tests of this folder apply them to every registered one.

A law takes the strategy and a manner of writing, plays simulated answers and compares their tokens with the plain,
synchronous reference of `tests.strategies.oracle`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.simulation import Network, SimulatedSession, Simulation
from paceline.core.clock import SILENCE_S
from paceline.core.sampling.sampler import Mask, SamplingParams
from paceline.engine.base import Engine
from paceline.strategies.base import (
    SIDES,
    Branch,
    Cancelled,
    Effect,
    Emit,
    Event,
    LinkLost,
    Machine,
    Side,
    Strategy,
    other,
)
from paceline.strategies.registry import STRATEGIES
from tests.core.tables import check
from tests.depth import DEPTH
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
from tests.strategies.conformance.worlds import IN_ORDER, SHORT, Flapping, changing_speeds, harsh

QUICK = 2  # seeds, at a depth of 1


def every_manner(
    *,
    with_peer: bool | None = None,
    part: tuple[int, int] = (0, 1),
    one_writer: bool = False,
    samplings: Mapping[str, SamplingParams] | None = None,
    fronts: bool = False,
    networks: bool = False,
) -> pytest.MarkDecorator:
    """Parameters `strategy` and `manner`, and those that are asked for of `sampling`, `front` and `reorders`.

    with_peer: of both sides alone, or of one side alone. part: the first manner of each strategy, and of the others the
    one of so many parts, for checks that take long. one_writer: where one model's text is written, and no mixture of
    both. fronts: both with the first manner of a strategy; with the others by turns, so that every two of manner, front
    and sampling meet. networks: a link in order, and one that reorders, which is slow, by turns with the fronts. All of
    these at a greater depth.
    """
    names = ["strategy", "manner", *(["front"] if fronts or networks else [])]
    names += [*(["reorders"] if networks else []), *(["sampling"] if samplings else [])]
    found: dict[str, object] = {}
    for strategy in STRATEGIES.values():
        if with_peer not in (None, strategy.needs_peer) or (one_writer and strategy.text_of == "both"):
            continue
        for number, (name, manner) in enumerate(manners(strategy).items()):
            whole = DEPTH > 1 or number == 0
            if not whole and number % part[1] != part[0]:
                continue
            for at, (how, sampling) in enumerate((samplings or {"": None}).items()):
                for front, reorders in _turns(whole, number, at, networks) if fronts or networks else [("", False)]:
                    network = ("reordering" if reorders else "in order") if networks else ""
                    case = "".join(f"{each}-" for each in (how, front, network) if each) + f"{strategy.name}, {name}"
                    values = [strategy, manner, *([front] if front else []), *([reorders] if networks else [])]
                    marks = [pytest.mark.slow] if reorders else []
                    found[case] = pytest.param(*values, *([sampling] if samplings else []), marks=marks)
    return pytest.mark.parametrize(names, list(found.values()), ids=list(found))


def _turns(whole: bool, number: int, at: int, networks: bool) -> list[tuple[Side, bool]]:
    """Front and network of the cases of a manner by its number, and of a sampling: one of each, so that over the
    manners every front meets every network."""
    if not networks:
        return [(front, False) for front in (SIDES if whole else (SIDES[(number + number // 2 + at) % 2],))]
    if DEPTH > 1:
        return [(front, reorders) for front in SIDES for reorders in (False, True)]
    if whole:
        return [("device", False), ("cloud", True)]
    return [(SIDES[(number // 2 + number // 4 + at) % 2], (number // 2 + at) % 2 == 0)]


def seeds_of(*case: object) -> range:
    """One seed at a depth of 1, drawn by the case, so that cases differ in their networks and speeds."""
    first = random.Random(" ".join(map(str, case))).randrange(10)
    return range(first, first + DEPTH)


def deeper(every: int) -> int:
    """Steps between two of which one is tried, at this depth."""
    return max(1, every // DEPTH)


def steps_of(case: str, every: int, events: int, first: int = 1) -> range:
    """Steps of an answer at which something is done to it, at least one. The first one is drawn by the case."""
    return range(first + random.Random(case).randrange(min(every, events - first)), events, every)


EVERY_FRONT = pytest.mark.parametrize("front", SIDES)
EVERY_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())


def settled(manner: Manner, sampling: SamplingParams) -> SamplingParams:
    """Where only the distribution of the text is declared: with one token to sample from, so that there is one text.
    Drafts are accepted, rejected and recovered all the same."""
    return replace(sampling, top_k=1) if manner.only_in_distribution else sampling


def reference(
    strategy: Strategy,
    front: Side,
    sampling: SamplingParams,
    manner: Manner,
    branches: Mapping[Side, tuple[Branch, ...]] = BRANCHES,
    *,
    by: Mapping[Side, Engine] | None = None,
    mask: Mask | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[int]:
    """The text that the strategy declares. by: other models than the usual ones."""
    by = by or engines()
    if strategy.text_of == "both":
        how = oracle.REFERENCES[manner.rule]
        return how(by, branches, sampling, max_tokens, EOS, rescoring=manner.rescoring, mask=mask)
    writer = front if strategy.text_of == "front" else "cloud"
    rules: dict[str, Any] = {"rescoring": manner.rescoring, "mask": mask}
    return oracle.continued_alone(by[writer], branches[writer], [], sampling, max_tokens, EOS, **rules)


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
    strategy: Strategy,
    manner: Manner,
    front: Side,
    sampling: SamplingParams,
    seeds: Iterable[int],
    *,
    reorders: bool,
    by: Callable[[], dict[Side, Engine]] = engines,
    mask: Mask | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[int]:
    """The text equals its reference, whatever the delays and the speeds, and is returned."""
    sampling = settled(manner, sampling)
    expected = reference(strategy, front, sampling, manner, by=by(), mask=mask, max_tokens=max_tokens)
    for seed in seeds:
        request = job(strategy, front, sampling, manner=manner, max_tokens=max_tokens, mask=mask)
        world = harsh(seed, reorders=reorders).world(request, seed, by())
        answer = world.run(changing_speeds if seed % 2 else None)
        assert answer.tokens == expected, f"seed {seed}"
        if request.config.means.table is not None:
            check(request.config.means.table)
        assert answer.finished is not None
        assert answer.finished.reason == ("length" if len(expected) == max_tokens else "stop")
    return expected


def check_loss(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, network: Network, *, every: int = 6
) -> None:
    """A peer killed at any step leaves the prefix it took part in, and the front continues that alone.

    every: steps between two kills; the first one varies with the parameters.
    """
    every = deeper(every)
    sampling = settled(manner, sampling)

    def world() -> Simulation:
        return Simulation(job(strategy, front, sampling, manner=manner, max_tokens=SHORT), engines(), network=network)

    undisturbed = world()
    whole = undisturbed.run().tokens
    alone_from: set[int] = set()
    for step in steps_of(f"{manner} {front} {sampling}", every, undisturbed.events):
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
    assert every > 4 or strategy.text_of != "both" or alone_from, "it was cut somewhere"


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


def check_mute(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, seconds: float, *, every: int = 21
) -> None:
    """A peer that is mute for a while, from any step on: a pause is waited out, and changes no text. A longer silence
    leaves the prefix; the front continues it alone, and both from where the peer is back, which is checked at every
    step alone. every: as in `check_loss`.
    """
    sampling = settled(manner, sampling)

    def world() -> Simulation:
        request = job(strategy, front, sampling, manner=manner, max_tokens=SHORT)
        forward = {front: 0.2, other(front): 0.1}  # so that a peer may be back before the answer has ended
        return Simulation(request, engines(), network=IN_ORDER, forward=forward)

    undisturbed = world()
    whole = undisturbed.run().tokens
    every = deeper(every)
    returned = 0
    for step in steps_of(f"mute {manner} {front} {sampling}", every, undisturbed.events):
        before: list[int] = []

        def mute(world: Simulation, step: int = step, before: list[int] = before) -> None:
            (link,) = world.links.values()
            if world.events == step:
                before[:] = world.front.tokens
                link.mute()
                world.clock.after(seconds, link.unmute)

        played = world()
        answer = played.run(mute)
        assert answer.finished is not None and answer.finished.reason in ("stop", "length")
        assert answer.tokens[: len(before)] == before, f"step {step}"
        if not answer.passed_over:
            assert answer.tokens == whole, f"step {step}"
            continue
        assert seconds > SILENCE_S, f"step {step}: {answer.passed_over}"
        returned += played.session(other(front)).openings > 1
        shared = next((at for at, pair in enumerate(zip(answer.tokens, whole, strict=False)) if len({*pair}) > 1), None)
        assert _is_resumed(strategy, front, sampling, manner, answer.tokens, whole[:shared]), f"step {step}"
    waits = strategy.text_of != front  # else the front writes by itself, and passes nobody over
    assert every > 1 or returned or not waits or seconds <= SILENCE_S, "it was never back"


def _is_resumed(
    strategy: Strategy, front: Side, sampling: SamplingParams, manner: Manner, tokens: list[int], prefix: list[int]
) -> bool:
    """True if the text is a part of this prefix, a part of what the front continues alone, and the rest of both."""

    def together_again(start: list[int]) -> list[int]:
        if strategy.text_of == "cloud":
            return alone("cloud", sampling, manner, SHORT, start)
        how = oracle.REFERENCES[manner.rule]
        return how(engines(), BRANCHES, sampling, SHORT, EOS, rescoring=manner.rescoring, prefix=start)

    for kept in range(len(prefix) + 1):
        by_itself = alone(front, sampling, manner, SHORT, prefix[:kept])
        for back in range(kept, len(by_itself) + 1):
            if tokens == together_again(by_itself[:back]) or (back == len(by_itself) and tokens == by_itself):
                return True
    return False


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
    sampling = settled(manner, SAMPLINGS["sampled"])
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


def check_cancel(strategy: Strategy, manner: Manner, front: Side, network: Network, *, every: int = 10) -> None:
    """An answer cancelled at any step is a prefix, and every sequence is released on both sides.

    every: steps between two cancellations; the first one varies with the parameters.
    """
    every = deeper(every)
    request = job(strategy, front, SAMPLINGS["greedy"], manner=manner, max_tokens=SHORT)
    undisturbed = Simulation(request, engines(), network=network)
    whole = undisturbed.run().tokens
    for step in steps_of(f"{manner} {front}", every, undisturbed.events, 2):

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


class Recorded:
    """A machine, and what it emits."""

    def __init__(self, machine: Machine, emitted: list[Emit]) -> None:
        self._machine, self._emitted = machine, emitted

    def on(self, event: Event) -> Sequence[Effect]:
        effects = self._machine.on(event)
        self._emitted += [effect for effect in effects if isinstance(effect, Emit)]
        return effects

    def stats(self) -> Mapping[str, float]:
        return self._machine.stats()


def check_plain_dists(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, *, linked: bool = True
) -> None:
    """What is emitted for logprobs is the writing model's own distribution, whatever is done to it before a token is
    chosen."""
    emitted: list[Emit] = []
    recorded = replace(strategy, machine=lambda config: Recorded(strategy.machine(config), emitted))
    request = job(recorded, front, sampling, manner=manner)
    tokens = Simulation(request, engines(), network=IN_ORDER, linked=linked).run().tokens
    writer = "cloud" if linked and strategy.text_of == "cloud" else front
    assert tokens and [emit.token for emit in emitted] == tokens
    for at, emit in enumerate(emitted):
        assert emit.dist is not None
        plain, _ = oracle.side_dist(
            engines()[writer], BRANCHES[writer], tokens[:at], SamplingParams(), rescoring=manner.rescoring
        )
        mass = float(emit.dist.probs.sum()) + emit.rest
        for token, prob in [(emit.token, plain.prob(emit.token)), *plain.top(20)]:
            assert prob > 0.0 and emit.dist.prob(token) / mass == pytest.approx(prob, rel=1e-9), f"{at}: {token}"


def check_lane_alone(strategy: Strategy, manner: Manner, front: Side) -> None:
    """A front that writes alone names itself as the lane where it reads a document, and no side where it reads none."""
    options = job(strategy, front, SAMPLINGS["greedy"], manner=manner).config.options
    for score, lane in ((0.5, front), (None, None)):
        hand = Hand(strategy.machine, front, front=True, joined=False, options=options)
        hand.begin(score)
        assert {emit.lane for emit in hand.emitted} == {lane}


def check_without_documents(
    strategy: Strategy, manner: Manner, front: Side, empty: Side, seeds: Iterable[int], *, reorders: bool
) -> None:
    """A side without documents decides nothing where the text is of both."""
    sampling = settled(manner, SAMPLINGS["sampled"])
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

    assert play() == play(look)
