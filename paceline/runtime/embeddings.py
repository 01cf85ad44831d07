"""Vectors of texts for clients, by the embedder that the documents are found with.

Computed off the event loop a few texts at a time; between two parts others have their turn, and a client that has left
costs no more than the part under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from paceline.errors import RequestError
from paceline.rag.embedder import Embedder
from paceline.rag.records import Vectors
from paceline.runtime.service import Embeddings

PART = 32  # texts
MAX_TOKENS = 8192  # of one text, as OpenAI's; what of it an embedder reads is its own matter


class TextEmbedder:
    """One part at a time: embedders compute on the cores that the engine needs."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._turn = asyncio.Lock()

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Raises RequestError (400) for a text that is too long, before anything is embedded."""
        tokens: list[int] = []
        for start in range(0, len(texts), PART):
            async with self._turn:
                tokens += await asyncio.to_thread(self._counts, texts[start : start + PART], start)
        parts: list[Vectors] = [np.empty((0, self._embedder.dimensions), np.float32)]
        for start in range(0, len(texts), PART):
            async with self._turn:
                parts.append(await asyncio.to_thread(self._embedder.embed, texts[start : start + PART]))
        return Embeddings(np.concatenate(parts), sum(tokens))

    def _counts(self, texts: Sequence[str], first: int) -> list[int]:
        counts = [self._embedder.count(text) for text in texts]
        for index, count in enumerate(counts, first):
            if count > MAX_TOKENS:
                raise RequestError(
                    f"This model's maximum context length is {MAX_TOKENS} tokens. However, input {index} resulted in "
                    f"{count} tokens. Please reduce its length.",
                    code="context_length_exceeded",
                    param="input",
                )
        return counts
