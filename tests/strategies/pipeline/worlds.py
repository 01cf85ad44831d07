"""Answers of `pipeline` on fake engines cut into stages, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lab.simulation import Simulation, StageTimes
from paceline.core.drafting.ngram_drafter import Candidates, DraftTree
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import Branch, Machine, MachineConfig, Strategy
from paceline.strategies.decoding.prefix_tree import TreeDrafter
from paceline.strategies.pipeline import Pipeline
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Options
from tests.strategies.cases import EOS, QUESTION, VOCAB, job

TURN = StageTimes(4, lambda _: 1.0)  # four stages in lockstep, whatever they are sent
ALONE = {"cloud": (Branch(tuple(QUESTION), None),)}


@dataclass(slots=True)
class Silent:
    """Drafts nothing, or nothing that is ever right."""

    def read(self, tokens: Iterable[int]) -> None: ...

    def observe(self, token: int) -> None: ...

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None: ...

    def draft(self, budget: int, position: int) -> DraftTree:  # noqa: ARG002  # interface of `TreeDrafter`
        return DraftTree()


def chain(tokens: Sequence[int]) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (1.0,) * len(tokens))


@dataclass(slots=True)
class Wrong(Silent):
    """Is sure of a chain of one token that the target never writes."""

    token: int = 1

    def draft(self, budget: int, position: int) -> DraftTree:  # noqa: ARG002  # interface of `TreeDrafter`
        return chain((self.token,) * budget)

    def successors(self, paths: Sequence[tuple[int, ...]]) -> list[Candidates]:
        return [[(self.token, 1.0)] for _ in paths]


@dataclass(slots=True)
class Knowing(Silent):
    """Drafts the answer, which it has been told, as a chain."""

    text: Sequence[int] = ()

    def draft(self, budget: int, position: int) -> DraftTree:
        rest = tuple(self.text[position : position + budget])
        return chain(rest)


@dataclass(slots=True)
class Random(Silent):
    """Drafts trees of any shape; some of its drafts are right, its scores say nothing."""

    text: Sequence[int] = ()
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def draft(self, budget: int, position: int) -> DraftTree:
        chance = self.chance
        tokens: list[int] = []
        parents: list[int] = []
        known: set[tuple[int, int]] = set()
        right = {-1: position}  # nodes on the answer's path, and the position after them
        for _ in range(chance.randrange(budget + 1)):
            parent = chance.randrange(-1, len(tokens))
            at = right.get(parent)
            is_right = at is not None and at < len(self.text) and chance.random() < 0.7
            token = self.text[at] if is_right and at is not None else chance.randrange(VOCAB)
            if (parent, token) in known:
                continue
            known.add((parent, token))
            if at is not None and at < len(self.text) and token == self.text[at]:
                right[len(tokens)] = at + 1
            tokens.append(token)
            parents.append(parent)
        probs: list[float] = []
        for parent in parents:
            probs.append((1.0 if parent < 0 else probs[parent]) * chance.choice((1.0, 0.9, 0.5, 0.0)))
        return DraftTree(tuple(tokens), tuple(parents), tuple(probs))

    def successors(self, paths: Sequence[tuple[int, ...]]) -> list[Candidates]:
        return [[(token, 0.5) for token in self.chance.sample(range(VOCAB), self.chance.randrange(4))] for _ in paths]


def strategy_with(drafter: Callable[[], TreeDrafter] | None, machine: Callable[..., Pipeline] = Pipeline) -> Strategy:
    def make(config: MachineConfig) -> Machine:
        return machine(config, drafter=None if drafter is None else drafter())

    return replace(STRATEGIES["pipeline"], machine=make)


def simulated(
    strategy: Strategy,
    options: Options | None = None,
    *,
    stages: StageTimes = TURN,
    tokens: int = 24,
    sampling: SamplingParams | None = None,
    engine: Engine | None = None,
    eos_ids: frozenset[int] = EOS,
    needs_dists: bool = False,
    draft: tuple[Engine, float] | None = None,
) -> Simulation:
    """One answer at the cloud, from the conversation alone. draft: a draft model, and seconds of its forward."""
    request = job(
        strategy,
        "cloud",
        sampling or SamplingParams(temperature=0.0),
        branches=ALONE,
        max_tokens=tokens,
        eos_ids=eos_ids,
        needs_dists=needs_dists,
        **({} if options is None else {"options": options}),
    )
    return Simulation(
        request,
        {"cloud": engine or FakeEngine(seed=1, spread=0.3)},
        stages={"cloud": stages},
        drafts={} if draft is None else {"cloud": draft},
    )
