"""Requests for the suites of this folder: documents, sampling, fake engines; and machines played by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from paceline.core.dist import Dist
from paceline.core.sampling import SamplingParams
from paceline.engine.contract import Engine
from paceline.engine.fake import FakeEngine
from paceline.runtime.world import Job
from paceline.strategies.machine import (
    Branch,
    Effect,
    Emit,
    Event,
    Finish,
    Forward,
    MachineFactory,
    Received,
    Retrieved,
    Scored,
    Send,
    Side,
    Started,
    Strategy,
    Task,
    Truncate,
    Woke,
)
from paceline.wire.messages import DraftTokens, SessionMessage, Targets
from paceline.wire.payload import encode_dist

VOCAB = 257
EOS = frozenset({256})
MAX_TOKENS = 24
QUESTION = b"user: where is the key?\nassistant: "

BRANCHES: dict[Side, tuple[Branch, ...]] = {
    "cloud": (
        Branch(tuple(b"The keys of the town hall hang in the cellar.\n" + QUESTION), 1.2),
        Branch(tuple(b"Every town has a hall.\n" + QUESTION), 0.4),
    ),
    "device": (Branch(tuple(b"I left the key with Orla.\n" + QUESTION), 1.0),),
}

SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, seed=7),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, frequency_penalty=0.5, seed=-3),
}


def engines() -> dict[Side, Engine]:
    """Two different models of one vocabulary."""
    return {"cloud": FakeEngine(seed=1, spread=0.3), "device": FakeEngine(seed=1, spread=0.5)}


def job(
    strategy: Strategy,
    front: Side,
    sampling: SamplingParams,
    *,
    branches: Mapping[Side, tuple[Branch, ...]] = BRANCHES,
    max_tokens: int = MAX_TOKENS,
    eos_ids: frozenset[int] = EOS,
    room: Mapping[Side, int] | None = None,
) -> Job:
    task = Task(front, True, sampling, max_tokens, eos_ids, VOCAB)
    return Job(strategy, front, task, branches, room or {})


def without_documents(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    return (replace(branches[0], prompt=tuple(QUESTION), score=None),)


# ---- one machine, played by hand ------------------------------------------------------------------------------------
PROMPT = (1, 2, 3)


def point(token: int, mass: float = 0.9) -> Dist:
    """Nearly all mass on one token, the rest spread over all others."""
    probs = np.full(VOCAB, (1.0 - mass) / (VOCAB - 1))
    probs[token] = mass
    return Dist.dense(probs)


def found(score: float | None = 0.0, room: int | None = None) -> Retrieved:
    """One branch: a document, or with None the conversation alone."""
    return Retrieved((Branch(PROMPT, score),), room)


def drafted(start: int, *tokens: int, epoch: int = 0, log_weight: float | None = 0.0, law: Dist | None = None) -> Event:
    """A peer's drafts, each from a law with nearly all mass on it, or from this one."""
    dists = [encode_dist(point(token) if law is None else law) for token in tokens]
    return Received(DraftTokens(0, epoch, start, list(tokens), dists, log_weight))


def decided(start: int, *tokens: int, epoch: int = 0, lanes: bytes | None = None) -> Event:
    """A peer's targets."""
    return Received(Targets(0, epoch, start, list(tokens), bytes(len(tokens)) if lanes is None else lanes))


class Hand:
    """A machine without engine, link or clock, told events one by one. Checks the rows of every forward.

    `say` is what its engine would answer for an output position. `answer` gives these answers until none is wanted.
    """

    def __init__(self, machine: MachineFactory, side: Side, *, front: bool, **changes: object) -> None:
        task = Task(side, front, SamplingParams(temperature=0.0), 8, EOS, VOCAB, linked=True)
        self.machine = machine(replace(task, **changes))  # type: ignore[arg-type]  # any of Task's fields
        self.effects: list[Effect] = []
        self.say: Callable[[int], Dist] = lambda _: point(65)
        self._waiting: list[Forward] = []
        self._rows = 0
        self._now = 0.0

    def on(self, *events: Event) -> list[Effect]:
        """What these events lead to."""
        effects = [effect for event in events for effect in self.machine.on(event)]
        for effect in effects:
            match effect:
                case Forward(_, segment):
                    assert segment.start == self._rows
                    self._rows += len(segment.tokens)
                    self._waiting.append(effect)
                case Truncate(_, length):
                    assert len(PROMPT) <= length <= self._rows
                    self._rows = length
                    self._waiting = [forward for forward in self._waiting if _end(forward) <= length]
        self.effects += effects
        return effects

    def answer(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._waiting:
            assert self._rows < 1000, "it computes for ever"
            forward = self._waiting.pop(0)
            effects += self.on(Scored(forward.ticket, (self.say(_end(forward) - len(PROMPT)),)))
        return effects

    def begin(self, score: float | None = 0.0) -> list[Effect]:
        return [*self.on(Started(0.0), found(score)), *self.answer()]

    def wake(self) -> list[Effect]:
        self._now += 1.0
        return self.on(Woke(self._now))

    @property
    def emitted(self) -> list[Emit]:
        return [effect for effect in self.effects if isinstance(effect, Emit)]

    @property
    def sent(self) -> list[SessionMessage]:
        return [effect.message for effect in self.effects if isinstance(effect, Send)]

    @property
    def finish(self) -> Finish:
        """The last effect, which must be one."""
        last = self.effects[-1]
        assert isinstance(last, Finish), self.effects
        return last


def _end(forward: Forward) -> int:
    return forward.segment.start + len(forward.segment.tokens)
