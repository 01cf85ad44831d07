"""Prompt log-probabilities: score each prompt token given its prefix.

Scored a few rows at a time, because a row's distribution is as wide as the vocabulary; only the requested logprobs are
kept. Other sequences run between two parts, and one prompt is scored at a time, so that memory does not grow with the
number of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.core.batching.segment import Segment
from paceline.core.sampling.dist import Dist
from paceline.engine.base import TextModel
from paceline.runtime.engine_loop.requests import SequenceOp
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.service import Logprobs
from paceline.runtime.sessions.output_text import logprobs_of

PART_BYTES = 1 << 26  # of float64 distributions at once: 55 rows of a vocabulary of 152k
MAX_ROWS = 128


class PromptScorer:
    """Scores prompts one at a time, on the loop of its worker."""

    def __init__(self, worker: EngineWorker, tokenizer: TextModel, vocab_size: int) -> None:
        """vocab_size: without the ids that pad an engine's vocabulary."""
        self._worker = worker
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._rows = max(1, min(MAX_ROWS, PART_BYTES // (8 * vocab_size)))
        self._turn = asyncio.Lock()

    async def score(self, prompt: Sequence[int], top: int) -> tuple[Logprobs, ...]:
        """Logprobs of all tokens but the first. Cancellation releases the KV rows. Raises EngineError."""
        async with self._turn:
            seq = self._worker.allocate()
            group = self._worker.group(len(prompt) + self._worker.steps.engine.block_size)  # grows part by part
            items: list[Logprobs] = []
            try:
                for start in range(0, len(prompt) - 1, self._rows):
                    rows = tuple(prompt[start : min(start + self._rows, len(prompt) - 1)])
                    dists = await self._worker.compute(Segment(seq, start, rows, logits="all"), group)
                    following = prompt[start + 1 : start + 1 + len(rows)]
                    items += await asyncio.to_thread(self._logprobs, dists, following, top)
            finally:
                self._worker.control(SequenceOp.release(seq))
            return tuple(items)

    def _logprobs(self, dists: Sequence[Dist], following: Sequence[int], top: int) -> list[Logprobs]:
        return [
            logprobs_of(self._tokenizer, token, dist.within(self._vocab_size), top)
            for dist, token in zip(dists, following, strict=True)
        ]
