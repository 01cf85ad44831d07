"""Scorers: the probability of each token of a text after a context.

Two kinds: any engine of the program, with many contexts in one forward, and n-gram tables
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
        """The model and its training text, for the report's conditions."""

    def score(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        """For each context (len(text) - start,): p(text[i] | context, text[:i]) for i >= start >= 1."""


class EngineScorer:
    """Scorer on an engine, with a sequence per context. Owned by one thread, as the engine is."""

    def __init__(self, engine: Engine, description: str, *, max_rows: int = 4096) -> None:
        """max_rows: of one forward, to bound memory; a single sequence may exceed it."""
        self._engine, self._max_rows = engine, max_rows
        self.description = description

    def score(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        scores: list[Probabilities] = []
        longest = max((len(context) for context in contexts), default=0) + len(text)
        remaining = iter(contexts)
        while group := list(islice(remaining, max(1, self._max_rows // longest))):
            scores += self._score_group(group, text, start)
        return scores

    def _score_group(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        unscored = text[: start - 1]  # after the context
        heads = [(SeqId(i), context + unscored) for i, context in enumerate(contexts) if context + unscored]
        if heads:
            self._engine.forward(Batch(tuple(Segment(seq, 0, ids, logits="none") for seq, ids in heads)))
        rows = text[start - 1 : -1]
        tails = [
            Segment(SeqId(i), len(context) + len(unscored), rows, logits="all") for i, context in enumerate(contexts)
        ]
        output = self._engine.forward(Batch(tuple(tails)))
        for i in range(len(contexts)):
            self._engine.release(SeqId(i))
        return [
            np.array([dist.prob(token) for dist, token in zip(dists, text[start:], strict=True)])
            for dists in output.dists
        ]
