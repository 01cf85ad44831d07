"""Prompts scored in parts: the same logprobs as at once, bounded distributions, and no sequence left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Output
from paceline.engine.fake import EOS, VOCAB, ByteTokenizer, FakeEngine
from paceline.errors import EngineError
from paceline.runtime.sessions import output_text as scoring
from paceline.runtime.sessions.output_text import PromptScorer
from tests.runtime.engine_loop.test_worker import started

pytestmark = pytest.mark.anyio

PROMPT = tuple(b"The bicycle stands where the road ends, and nobody has asked for it. " * 4)


class CountingEngine(FakeEngine):
    """Records the largest number of distributions of a forward, and can fail."""

    def __init__(self) -> None:
        super().__init__(3, spread=0.3)
        self.max_dists = 0
        self.fails = False

    def forward(self, batch: Batch) -> Output:
        if self.fails:
            raise EngineError("no memory is left")
        output = super().forward(batch)
        self.max_dists = max(self.max_dists, sum(map(len, output.dists)))
        return output

    def held(self) -> bool:
        return any(self.length(SeqId(seq)) for seq in range(1, 50))


@asynccontextmanager
async def scorers(engine: FakeEngine, vocab_size: int = VOCAB) -> AsyncIterator[PromptScorer]:
    async with asyncio.timeout(30), started(engine) as worker:
        yield PromptScorer(worker, ByteTokenizer(), vocab_size)


async def test_parts_give_the_same_logprobs_as_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    dists = FakeEngine(3, spread=0.3).forward(Batch((Segment(SeqId(1), 0, PROMPT, logits="all"),))).dists[0]
    monkeypatch.setattr(scoring, "MAX_ROWS", 7)
    engine = CountingEngine()
    async with scorers(engine) as scorer:
        scored = await scorer.score(PROMPT, 3)
    assert engine.max_dists == 7
    assert len(scored) == len(PROMPT) - 1
    for dist, token, (chosen, top) in zip(dists, PROMPT[1:], scored, strict=False):
        assert chosen.bytes == (token,)
        assert chosen.logprob == pytest.approx(math.log(dist.prob(token))) if dist.prob(token) else -9999.0
        assert [one.bytes for one in top] == [(best,) if best != EOS else () for best, _ in dist.top(3)]
    assert not engine.held()


async def test_the_wider_the_vocabulary_the_fewer_rows_at_once() -> None:
    async with scorers(FakeEngine(), 152_000) as scorer:
        assert scorer._rows * 152_000 * 8 <= scoring.PART_BYTES


async def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    engine = CountingEngine()
    async with scorers(engine) as scorer:
        assert await scorer.score((65,), 5) == ()
    assert engine.max_dists == 0


async def test_concurrent_prompts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_ROWS", 16)
    engine = CountingEngine()
    async with scorers(engine) as scorer:
        scored = await asyncio.gather(*(scorer.score(PROMPT[: 40 + 10 * number], 1) for number in range(8)))
    assert [len(one) for one in scored] == [39 + 10 * number for number in range(8)]
    assert engine.max_dists == 16 and not engine.held()


async def test_cancellation_releases_the_rows_and_the_turn() -> None:
    engine = CountingEngine()
    async with scorers(engine) as scorer:
        task = asyncio.create_task(scorer.score(PROMPT, 1))
        await asyncio.sleep(0)  # it has begun
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await scorer.score(PROMPT[:9], 1)) == 8
    assert not engine.held()


async def test_an_engine_error_is_raised_and_the_next_prompt_is_scored() -> None:
    engine = CountingEngine()
    async with scorers(engine) as scorer:
        engine.fails = True
        with pytest.raises(EngineError, match="no memory is left"):
            await scorer.score(PROMPT, 1)
        engine.fails = False
        assert len(await scorer.score(PROMPT[:9], 1)) == 8
    assert not engine.held()
