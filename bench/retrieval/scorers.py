"""What a bench asks of a language model: the probability of each token of a text after a context.

Two kinds: any engine of the program, in one forward of chains for many contexts, and tables
(`bench/retrieval/ngram_model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine

Ids = tuple[int, ...]
Probabilities = NDArray[np.float64]


class Scorer(Protocol):
    """Probabilities of text under a language model."""

    @property
    def description(self) -> str:
        """For the report's conditions: what it is and what it has read."""

    def score(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        """For each context (len(text) - start,): p(text[i] | context, text[:i]) for i >= start >= 1."""


class EngineScorer:
    """An engine: every context is a branch of its own. Owned by one thread, as the engine is."""

    def __init__(self, engine: Engine, description: str, *, most_rows: int = 4096) -> None:
        """most_rows: in one forward, a bound on memory; a single branch may exceed it."""
        self._engine, self._most_rows = engine, most_rows
        self.description = description

    def score(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        found: list[Probabilities] = []
        longest = max((len(context) for context in contexts), default=0) + len(text)
        waiting = iter(contexts)
        while group := list(islice(waiting, max(1, self._most_rows // longest))):
            found += self._together(group, text, start)
        return found

    def _together(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        read = text[: start - 1]  # after the context, still not asked
        heads = [(SeqId(place), context + read) for place, context in enumerate(contexts) if context + read]
        if heads:
            self._engine.forward(Batch(tuple(Segment(seq, 0, ids, logits="none") for seq, ids in heads)))
        rows = text[start - 1 : -1]
        tails = [
            Segment(SeqId(place), len(context) + len(read), rows, logits="all")
            for place, context in enumerate(contexts)
        ]
        output = self._engine.forward(Batch(tuple(tails)))
        for place in range(len(contexts)):
            self._engine.release(SeqId(place))
        return [
            np.array([dist.prob(token) for dist, token in zip(dists, text[start:], strict=True)])
            for dists in output.dists
        ]
