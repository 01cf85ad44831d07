"""Text embeddings for clients, by the embedder of the document index.

Computed off the event loop a few texts at a time: other requests take turns between two parts, and a cancelled request
costs at most the part under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from paceline.errors import RequestError
from paceline.rag.embedder import Embedder
from paceline.rag.records import Vectors
from paceline.runtime.service import Embeddings
from paceline.runtime.units.plain_work import PlainWork

PART_TEXTS = 32
MAX_TOKENS = 8192  # of one text, as in OpenAI's API; an embedder may truncate it further


class TextEmbedder:
    """Embeds one part at a time, because embedders use the cores that the engine needs."""

    def __init__(self, embedder: Embedder, work: PlainWork) -> None:
        self._embedder = embedder
        self._work = work
        self._turn = asyncio.Lock()

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Embed texts. Raises RequestError (400) for a text that is too long, before any is embedded."""
        tokens: list[int] = []
        for start in range(0, len(texts), PART_TEXTS):
            async with self._turn:
                tokens += await asyncio.to_thread(self._count_tokens, texts[start : start + PART_TEXTS], start)
        parts: list[Vectors] = [np.empty((0, self._embedder.dimensions), np.float32)]
        for start in range(0, len(texts), PART_TEXTS):
            async with self._turn:
                part = texts[start : start + PART_TEXTS]
                parts.append(await self._work.embed(len(part), partial(self._embedder.embed, part)))
        return Embeddings(np.concatenate(parts), sum(tokens))

    def _count_tokens(self, texts: Sequence[str], first: int) -> list[int]:
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
