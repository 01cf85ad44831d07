"""Requests for the conformance suite: documents on each side, sampling, fake engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.sampling import SamplingParams
from paceline.engine.contract import Engine
from paceline.engine.fake import FakeEngine
from paceline.runtime.world import Job
from paceline.strategies.machine import Branch, Side, Strategy, Task

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
) -> Job:
    task = Task(front, True, sampling, max_tokens, EOS, vocab_size=257)
    return Job(strategy, front, task, branches)


def without_documents(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    return (replace(branches[0], prompt=tuple(QUESTION), score=None),)
