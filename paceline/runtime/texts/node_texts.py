"""Services of a node for texts that it does not answer: tokens, log-probabilities, searches, vectors, relevance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from paceline.errors import RequestError
from paceline.rag.rerank import Reranker
from paceline.runtime.resources import Resources
from paceline.runtime.service import EmbedderInfo, Embeddings, Logprobs, Reranked
from paceline.runtime.sessions.output_text import token_strings
from paceline.runtime.sessions.prompt_logprobs import PromptScorer
from paceline.runtime.texts.embeddings import TextEmbedder
from paceline.runtime.texts.reranking import PassageReranker
from paceline.runtime.workflows.service import own_reranker

T = TypeVar("T")


class NodeTexts:
    """These methods of `Service`, for the one model of a node. Belongs to its loop."""

    def __init__(self, resources: Resources, reranker: Reranker | None) -> None:
        """reranker: None for the one of the store's own embedder, if it has one."""
        self.relevance = resources.relevance  # the scale of this side's; None: it keeps no documents
        self._work = resources.work
        self._tokenizer = resources.tokenizer
        self._scorer = PromptScorer(resources.worker, resources.tokenizer, resources.vocab_size)
        self._embedder: TextEmbedder | None = None
        self._info: tuple[EmbedderInfo, ...] = ()
        self._reranker: PassageReranker | None = None
        if resources.store is None:
            return
        embedder = resources.store.embedder
        self._embedder = TextEmbedder(embedder, resources.work)
        self._info = (EmbedderInfo(embedder.served_name, embedder.dimensions, embedder.max_tokens),)
        found = reranker or own_reranker(resources.store)
        if found is not None:
            self._reranker = PassageReranker(found, resources.work, embedder.count)

    async def tokenize(self, text: str, model: str = "") -> tuple[int, ...]:  # noqa: ARG002
        return tuple(await asyncio.to_thread(self._tokenizer.raw, text))

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]], model: str = "") -> tuple[int, ...]:  # noqa: ARG002
        return tuple(await asyncio.to_thread(self._tokenizer.chat, messages))

    async def token_bytes(self, tokens: Sequence[int], model: str = "") -> tuple[bytes, ...]:  # noqa: ARG002
        return await asyncio.to_thread(token_strings, self._tokenizer, tokens)

    async def score(self, prompt: Sequence[int], top: int, model: str = "") -> Sequence[Logprobs]:  # noqa: ARG002
        return await self._scorer.score(prompt, top)

    async def find(self, work: Callable[[], T]) -> T:
        return await self._work.search(work)

    def embedders(self) -> Sequence[EmbedderInfo]:
        return self._info

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        if self._embedder is None:
            raise RequestError("This side keeps no documents and has no embedder.", status=404, param="model")
        return await self._embedder.embed(texts)

    def rerankers(self) -> Sequence[str]:
        return () if self._reranker is None else (self._reranker.name,)

    async def rerank(self, query: str, passages: Sequence[str]) -> Reranked:
        if self._reranker is None:
            raise RequestError("This side has no reranker: start it with --reranker.", status=404, param="model")
        return await self._reranker.rerank(query, passages)
