"""Relevance of passages for clients, by the reranker of this side's workflows, a few passages at a time: other requests
take turns between two parts, and a cancelled request costs at most the part under way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from paceline.rag.rerank import CrossEncoder, Reranker
from paceline.runtime.service import Reranked
from paceline.runtime.units.plain_work import PlainWork

PART_PASSAGES = 8  # half a second of late interaction on one core, for passages of 160 tokens


class PassageReranker:
    """Scores one part at a time, because rerankers use the cores that the engine needs."""

    def __init__(self, reranker: Reranker, work: PlainWork, count: Callable[[str], int]) -> None:
        """count: tokens of a text."""
        self._reranker = reranker
        self._work = work
        self._count = count
        self._turn = asyncio.Lock()

    @property
    def name(self) -> str:
        return self._reranker.name

    async def rerank(self, query: str, passages: Sequence[str]) -> Reranked:
        scores: list[float] = []
        for start in range(0, len(passages), PART_PASSAGES):
            part = passages[start : start + PART_PASSAGES]
            async with self._turn:
                found = await self._work.rerank(len(part), partial(self._reranker.score, query, part))
            scores += map(float, found)
        if isinstance(self._reranker, CrossEncoder):  # logits; clients compare with thresholds from 0 to 1
            scores = [_probability(score) for score in scores]
        tokens = await asyncio.to_thread(lambda: sum(map(self._count, [query, *passages])))
        return Reranked(tuple(scores), tokens)


def _probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))
