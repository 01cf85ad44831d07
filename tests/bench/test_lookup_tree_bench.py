"""The bench of `lookup_tree`: drafts of its baselines, and distributions of its engines."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from bench.drafting.adversarial import HUGE, PROMPT, SETTINGS, Scripted, Setting, measure
from bench.drafting.drafters import OURS, PLAIN, DraftMemory, ModelDrafter, PromptLookup, ways
from bench.drafting.large_shape import Replay, Trace
from bench.drafting.single_session import together
from bench.drafting.workloads import TASKS, questions
from lab.configs import a_config
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import FakeEngine
from paceline.runtime.engine_loop.worker import EngineWorker


def test_prompt_look_up_copies_what_followed_the_longest_match() -> None:
    drafter = PromptLookup()
    for token in (1, 2, 3, 9, 8, 7, 3, 5, 1, 2, 3):
        drafter.observe(token)
    assert drafter.draft(2, 0).tokens == (9, 8)
    drafter.observe(100)
    assert len(drafter.draft(8, 0)) == 0


def test_a_draft_model_continues_the_text_and_rolls_back_rejected_drafts() -> None:
    drafter, engine = ModelDrafter(FakeEngine(3)), FakeEngine(3)
    text = list(b"user: hello assistant: ")
    for token in text:
        drafter.observe(token)
    for position in (1, 2, 3):
        expected: list[int] = []
        for _ in range(5):
            rows = (*text, *expected)
            expected.append(engine.forward(Batch((Segment(SeqId(1), 0, rows),))).dists[0][-1].argmax())
            engine.release(SeqId(1))
        assert list(drafter.draft(8, position).tokens) == expected
        text.append(expected[0] if position < 2 else 65)
        drafter.observe(text[-1])


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


def test_a_replay_has_the_small_models_distributions_on_the_trace_and_some_off_it() -> None:
    small, prompt = FakeEngine(1), tuple(b"user: hi assistant: ")
    trace = Trace.of(small, prompt, 6)
    replay = Replay(FakeEngine(9))
    replay.play(trace)
    first = replay.forward(Batch((Segment(SeqId(1), 0, prompt),))).dists[0][-1]
    assert first.argmax() == trace.tokens[0]
    right, wrong = trace.tokens[:2], (trace.tokens[0] + 1) % 256
    segment = Segment(SeqId(1), len(prompt), (right[0], right[1], wrong), (-1, 0, -1), "all")
    dists = replay.forward(Batch((segment,))).dists[0]
    assert [dist.argmax() for dist in dists[:2]] == list(trace.tokens[1:3])
    assert dists[2].probs.sum() == pytest.approx(1.0)
    assert replay.seconds > 0.0


def test_twenty_settings_and_a_script_that_is_followed() -> None:
    assert len(SETTINGS) == len(set(SETTINGS)) == 20
    assert any(s.vocab == HUGE for s in SETTINGS) and any(s.batch == 16 for s in SETTINGS)
    engine = Scripted(Setting("trap", 0.0), 0.0)
    dist = engine.forward(Batch((Segment(SeqId(1), 0, engine.prompt()),))).dists[0][-1]
    assert dist.argmax() == PROMPT % 4 and dist.probs.sum() == pytest.approx(1.0)
    row, _ = asyncio.run(measure(Setting("random", 0.1, tokens=16), forward_s=0.0, rounds=1))
    assert float(str(row["vs_plain"])) > 0.0 and row["draft_steps"] is not None


def test_questions_are_generated_without_data() -> None:
    by_task = questions(None, 2)
    assert tuple(by_task) == TASKS and all(len(texts) == 2 for texts in by_task.values())
