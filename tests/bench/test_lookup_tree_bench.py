"""The bench of `lookup_tree`: drafts of its baselines, and distributions of its engines."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from bench.drafting.adversarial import HUGE, PROMPT, SETTINGS, Scripted, Setting, measure
from bench.drafting.drafters import OURS, PLAIN, DraftMemory, ways
from bench.drafting.single_session import together
from lab.configs import a_config
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import FakeEngine
from paceline.runtime.engine_loop.worker import EngineWorker


def test_every_way_writes_the_same_text() -> None:
    prompt = tuple(b"user: where is the key? assistant: ")
    texts = {}

    async def write() -> None:
        worker = EngineWorker(FakeEngine(1))
        await worker.start()
        try:
            for name, way in ways(FakeEngine(2)).items():
                config = a_config("cloud", True, SamplingParams(temperature=0.0), 30, frozenset(), 257)
                (answer,) = await together(worker, [partial(way, config, DraftMemory(257))], [prompt])
                texts[name] = answer.tokens
        finally:
            await worker.stop()

    asyncio.run(write())
    assert set(texts) >= {PLAIN, OURS, "draft model"}
    assert len({tuple(tokens) for tokens in texts.values()}) == 1


def test_twenty_settings_and_a_script_that_is_followed() -> None:
    assert len(SETTINGS) == len(set(SETTINGS)) == 20
    assert any(s.vocab == HUGE for s in SETTINGS) and any(s.batch == 16 for s in SETTINGS)
    engine = Scripted(Setting("trap", 0.0), 0.0)
    dist = engine.forward(Batch((Segment(SeqId(1), 0, engine.prompt()),))).dists[0][-1]
    assert dist.argmax() == PROMPT % 4 and dist.probs.sum() == pytest.approx(1.0)
    row, _ = asyncio.run(measure(Setting("random", 0.1, tokens=16), forward_s=0.0, rounds=1))
    assert float(str(row["vs_plain"])) > 0.0 and row["draft_steps"] is not None
