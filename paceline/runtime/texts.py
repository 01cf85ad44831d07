"""Embeds, reranks, tokenizes and scores texts for clients."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from paceline.errors import RequestError
from paceline.rag.embedder import Embedder
from paceline.rag.records import Vectors
from paceline.rag.rerank import CrossEncoder, Reranker
from paceline.runtime.resources import Resources
from paceline.runtime.service import EmbedderInfo, Embeddings, Logprobs, Reranked
from paceline.runtime.sessions.output_text import PromptScorer, token_strings
from paceline.runtime.turnstile import Turnstile
from paceline.runtime.units import PlainWork
from paceline.runtime.workflows.run import own_reranker

PART_TEXTS = 32
PART_PASSAGES = 8  # half a second of late interaction on one core, for passages of 160 tokens
MAX_TOKENS = 8192  # of one text, as in OpenAI's API; an embedder may truncate it further


class TextEmbedder:
    """Embeds off the event loop one part at a time, because embedders use the cores that the engine needs: owners take
    turns between two parts, and a cancelled request costs at most the part under way."""

    def __init__(self, embedder: Embedder, work: PlainWork) -> None:
        self._embedder = embedder
        self.count = embedder.count  # tokens of a text
        self._work = work
        self._turns = Turnstile(1)

    async def embed(self, texts: Sequence[str], owner: str) -> Embeddings:
        """Embed texts. Raises RequestError (400) for a text that is too long, before any is embedded."""
        tokens: list[int] = []
        for start in range(0, len(texts), PART_TEXTS):
            async with self._turns.turn(owner):
                tokens += await asyncio.to_thread(self._count_tokens, texts[start : start + PART_TEXTS], start)
        parts: list[Vectors] = [np.empty((0, self._embedder.dimensions), np.float32)]
        for start in range(0, len(texts), PART_TEXTS):
            async with self._turns.turn(owner):
                part = texts[start : start + PART_TEXTS]
                parts.append(await self._work.embed(partial(self._embedder.embed, part), owner))
        return Embeddings(np.concatenate(parts), sum(tokens))

    def _count_tokens(self, texts: Sequence[str], first: int) -> list[int]:
        counts = [self.count(text) for text in texts]
        for index, count in enumerate(counts, first):
            if count > MAX_TOKENS:
                raise RequestError(
                    f"This model's maximum context length is {MAX_TOKENS} tokens. However, input {index} resulted in "
                    f"{count} tokens. Please reduce its length.",
                    code="context_length_exceeded",
                    param="input",
                )
        return counts


def _probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))


class NodeTexts:
    """The methods of `Service` for tokens, log-probabilities, searches, vectors and relevance of texts, for the one
    model of a node. Belongs to its loop."""

    def __init__(self, resources: Resources, reranker: Reranker | None) -> None:
        """reranker: None for the one of the store's own embedder, if it has one."""
        self.relevance = resources.relevance  # the scale of this side's; None: it keeps no documents
        self.find = resources.work.search
        self._tokenizer = resources.tokenizer
        self._scorer = PromptScorer(resources.worker, resources.tokenizer, resources.vocab_size)
        self._embedder: TextEmbedder | None = None
        self._info: tuple[EmbedderInfo, ...] = ()
        self._reranker: Reranker | None = None
        self._reranking = Turnstile(1)
        self._work = resources.work
        if resources.store is None:
            return
        embedder = resources.store.embedder
        self._embedder = TextEmbedder(embedder, resources.work)
        self._info = (EmbedderInfo(embedder.served_name, embedder.dimensions, embedder.max_tokens),)
        self._reranker = reranker or own_reranker(resources.store)

    async def tokenize(self, text: str, model: str = "") -> tuple[int, ...]:  # noqa: ARG002
        return tuple(await asyncio.to_thread(self._tokenizer.raw, text))

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]], model: str = "") -> tuple[int, ...]:  # noqa: ARG002
        return tuple(await asyncio.to_thread(self._tokenizer.chat, messages))

    async def token_bytes(self, tokens: Sequence[int], model: str = "") -> tuple[bytes, ...]:  # noqa: ARG002
        return await asyncio.to_thread(token_strings, self._tokenizer, tokens)

    async def score(
        self,
        prompt: Sequence[int],
        top: int,
        model: str = "",  # noqa: ARG002
        owner: str = "",
    ) -> Sequence[Logprobs]:
        return await self._scorer.score(prompt, top, owner)

    def embedders(self) -> Sequence[EmbedderInfo]:
        return self._info

    async def embed(self, texts: Sequence[str], owner: str) -> Embeddings:
        if self._embedder is None:
            raise RequestError("This side keeps no documents and has no embedder.", status=404, param="model")
        return await self._embedder.embed(texts, owner)

    def rerankers(self) -> Sequence[str]:
        return () if self._reranker is None else (self._reranker.name,)

    async def rerank(self, query: str, passages: Sequence[str], owner: str) -> Reranked:
        """Scores one part at a time, as `TextEmbedder` does."""
        if self._reranker is None or self._embedder is None:
            raise RequestError("This side has no reranker: set one in [tuning].", status=404, param="model")
        scores: list[float] = []
        for start in range(0, len(passages), PART_PASSAGES):
            part = passages[start : start + PART_PASSAGES]
            async with self._reranking.turn(owner):
                scores += map(float, await self._work.rerank(partial(self._reranker.score, query, part), owner))
        if isinstance(self._reranker, CrossEncoder):  # logits; clients compare with thresholds from 0 to 1
            scores = [_probability(score) for score in scores]
        count = self._embedder.count
        tokens = await asyncio.to_thread(lambda: sum(map(count, [query, *passages])))
        return Reranked(tuple(scores), tokens)
