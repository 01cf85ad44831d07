"""Prompts scored in parts: the same numbers as at once, a bounded number of laws, and nothing left behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Output
from paceline.engine.fake.engine import FakeEngine
from paceline.engine.fake.tokenizer import EOS, VOCAB, ByteTokenizer
from paceline.errors import EngineError
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.sessions import prompt_logprobs as scoring
from paceline.runtime.sessions.prompt_logprobs import PromptScorer

PROMPT = tuple(b"The bicycle stands where the road ends, and nobody has asked for it. " * 4)


class Watched(FakeEngine):
    """Counts the laws it gives, and can be told to wait or to fail."""

    def __init__(self) -> None:
        super().__init__(3, spread=0.3)
        self.most = 0
        self.fails = False

    def forward(self, batch: Batch) -> Output:
        if self.fails:
            raise EngineError("no memory is left")
        output = super().forward(batch)
        self.most = max(self.most, sum(map(len, output.dists)))
        return output

    def held(self) -> bool:
        return any(self.length(SeqId(seq)) for seq in range(1, 50))


@asynccontextmanager
async def scorers(engine: FakeEngine, vocab_size: int = VOCAB) -> AsyncIterator[PromptScorer]:
    worker = EngineWorker(engine)
    await worker.start()
    try:
        async with asyncio.timeout(30):
            yield PromptScorer(worker, ByteTokenizer(), vocab_size)
    finally:
        await worker.stop()


@pytest.mark.anyio
async def test_parts_give_what_one_forward_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = FakeEngine(3, spread=0.3).forward(Batch((Segment(SeqId(1), 0, PROMPT, logits="all"),))).dists[0]
    monkeypatch.setattr(scoring, "MAX_ROWS", 7)
    engine = Watched()
    async with scorers(engine) as scorer:
        scored = await scorer.score(PROMPT, 3)
    assert engine.most == 7
    assert len(scored) == len(PROMPT) - 1
    for law, token, (chosen, top) in zip(laws, PROMPT[1:], scored, strict=False):
        assert chosen.bytes == (token,)
        assert chosen.logprob == pytest.approx(math.log(law.prob(token))) if law.prob(token) else -9999.0
        assert [one.bytes for one in top] == [(best,) if best != EOS else () for best, _ in law.top(3)]
    assert not engine.held()


@pytest.mark.anyio
async def test_the_wider_the_vocabulary_the_fewer_rows_at_once() -> None:
    async with scorers(FakeEngine(), 152_000) as scorer:
        assert scorer._rows * 152_000 * 8 <= scoring.PART_BYTES


@pytest.mark.anyio
async def test_one_token_has_nothing_to_follow() -> None:
    engine = Watched()
    async with scorers(engine) as scorer:
        assert await scorer.score((65,), 5) == ()
    assert engine.most == 0


@pytest.mark.anyio
async def test_many_at_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_ROWS", 16)
    engine = Watched()
    async with scorers(engine) as scorer:
        scored = await asyncio.gather(*(scorer.score(PROMPT[: 40 + 10 * number], 1) for number in range(8)))
    assert [len(one) for one in scored] == [39 + 10 * number for number in range(8)]
    assert engine.most == 16 and not engine.held()


@pytest.mark.anyio
async def test_a_client_that_leaves_frees_the_rows_and_the_turn() -> None:
    engine = Watched()
    async with scorers(engine) as scorer:
        job = asyncio.create_task(scorer.score(PROMPT, 1))
        await asyncio.sleep(0)  # it has begun
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert len(await scorer.score(PROMPT[:9], 1)) == 8
    assert not engine.held()


@pytest.mark.anyio
async def test_an_engine_that_cannot_says_so_and_the_next_is_served() -> None:
    engine = Watched()
    async with scorers(engine) as scorer:
        engine.fails = True
        with pytest.raises(EngineError, match="no memory is left"):
            await scorer.score(PROMPT, 1)
        engine.fails = False
        assert len(await scorer.score(PROMPT[:9], 1)) == 8
    assert not engine.held()


def test_what_a_vocabulary_is_padded_with_has_no_part_in_a_law() -> None:
    law = Dist.dense(np.array([0.2, 0.2, 0.6]))
    assert law.within(2).probs.tolist() == [0.5, 0.5]
    assert law.within(3) is law
