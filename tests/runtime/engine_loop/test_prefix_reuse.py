"""Prompts that begin alike: computed once for each owner, whoever asks, however often, and over a link."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.batching.segment import Segment, SeqId
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.runtime.engine_loop.executor import StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, SequenceOp
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest, GenerationResult, TextDelta
from tests.requests import a_request, changed
from tests.runtime.engine_loop.test_executor import run_all
from tests.runtime.test_node import Bench, collect, nodes

pytestmark = pytest.mark.anyio

PROMPT = tuple(b"The key of the mill is under the stone.")
REQUEST = a_request(
    messages=({"role": "user", "content": "Where is the key?"},),
    sampling=SamplingParams(temperature=0.0),
    max_tokens=12,
    strategy="autoregressive",
    owner="ann",
)


def asked(steps: StepExecutor, seq: int, salt: str | None, tokens: tuple[int, ...] = PROMPT) -> ForwardRequest:
    request = ForwardRequest(Segment(SeqId(seq), 0, tokens), lambda _: None, salt=salt)
    steps.submit(request)
    return request


def test_equal_prompts_of_one_owner_that_come_together_are_computed_once() -> None:
    steps = StepExecutor(FakeEngine())
    requests = [asked(steps, seq, "ann") for seq in range(1, 9)]
    run_all(steps)
    assert steps.rows == len(PROMPT) + 7, "one row each is left to compute"
    assert [request.cached_rows for request in requests] == [0] + [len(PROMPT) - 1] * 7


def test_rows_are_shared_within_an_owner_alone() -> None:
    steps = StepExecutor(FakeEngine())
    requests = [asked(steps, seq, salt) for seq, salt in enumerate(("ann", "bob", None, None), 1)]
    run_all(steps)
    assert steps.rows == 4 * len(PROMPT) and not any(request.cached_rows for request in requests)


def test_a_prompt_shortened_before_it_begins_is_computed_whole() -> None:
    steps = StepExecutor(FakeEngine())
    asked(steps, 1, "ann")
    run_all(steps)
    asked(steps, 2, "ann")
    steps.submit(SequenceOp.truncate(SeqId(2), 5))
    run_all(steps)
    assert (steps.engine.length(SeqId(2)), steps.rows) == (5, len(PROMPT) + 5)


def test_a_prompt_that_waits_for_an_equal_one_is_computed_where_that_is_cancelled() -> None:
    steps = StepExecutor(FakeEngine(), 8)
    answered: list[object] = []
    asked(steps, 1, "ann")
    steps.submit(ForwardRequest(Segment(SeqId(2), 0, PROMPT), answered.append, salt="ann"))
    first = steps.next()
    assert first is not None and [each.segment.seq for each in first.segments] == [1]
    steps.run(first)
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert len(answered) == 1 and isinstance(answered[0], tuple)


async def test_a_peer_shares_nothing_between_answers_whose_clients_it_cannot_tell_apart() -> None:
    async with nodes() as (bench, _):
        for _ in range(2):
            _, done = await collect(await bench.cloud.prepare(changed(REQUEST, strategy="aggregate")))
            assert (done.strategy, done.degraded) == ("aggregate", None)
        assert bench.cloud.worker.steps.prefixes.adopted > 0 and bench.device.worker.steps.prefixes.adopted == 0


async def answer(node: Node, request: GenerateRequest) -> tuple[str, GenerationResult]:
    return await collect(await node.prepare(request))


async def test_turns_of_a_conversation_compute_only_what_is_new() -> None:
    """And the text is that of a node which has cached nothing."""
    engine = FakeEngine(1, spread=0.3)
    async with Node("cloud", LoadedModel(engine, ByteTokenizer()), None) as node:
        messages, before = REQUEST.prompt.messages, 0
        for turn in range(5):
            text, done = await answer(node, changed(REQUEST, messages=messages))
            async with Node("cloud", LoadedModel(FakeEngine(1, spread=0.3), ByteTokenizer()), None) as fresh:
                expected, _ = await answer(fresh, changed(REQUEST, messages=messages))
            assert text == expected
            cached = int(done.stats["cached_tokens"])
            assert cached >= before if turn else cached == 0, "all of the turn before"
            before = done.prompt_tokens
            following = {"role": "user", "content": f"And the {turn}. one?"}
            messages = (*messages, {"role": "assistant", "content": text}, following)
        _, other = await answer(node, changed(REQUEST, messages=messages, owner="bob"))
        assert other.stats["cached_tokens"] == 0


# ---- answers that a device opens at its cloud: kept while the link is away, shared by one client's alone ------------
LONG = "Where is the key to the old red boat, which my neighbour left in the harbour behind the mill last autumn?"
JOINT = a_request(
    messages=({"role": "user", "content": LONG},),
    sampling=SamplingParams(temperature=1.0, seed=5, logit_bias={256: -100.0}),
    max_tokens=40,
    strategy="draft_verify",
    documents=0,
    owner="ann",
)
BLOCK = 16  # rows; what does not fill one is computed again


def adopted(bench: Bench) -> int:
    """Rows that the cloud has not had to compute."""
    return bench.cloud.worker.steps.prefixes.adopted


async def test_an_answer_whose_link_was_lost_goes_on_without_another_prefill() -> None:
    async with nodes() as (bench, _):
        whole, _ = await collect(await bench.device.prepare(changed(JOINT, owner="bert")))
    async with nodes(gated=("cloud",)) as (bench, tasks):
        cloud = bench.engines["cloud"]
        events = (await bench.device.prepare(changed(JOINT, on_loss="pause"))).run()
        text = ""
        while len(text) < 8:
            cloud.gate.release()
            event = await anext(events)
            assert isinstance(event, TextDelta)
            text += event.text
        await bench.unlink()
        while cloud.held():  # the cloud's part has ended, its sequences are released
            cloud.gate.release()
            await asyncio.sleep(0)
        assert adopted(bench) == 0
        cloud.release_gate()
        await bench.link(tasks)
        async for event in events:
            text += event.text if isinstance(event, TextDelta) else ""
            if isinstance(event, GenerationResult):
                assert event.degraded is None and event.stats["alone"] == 0
        assert text == whole
        assert adopted(bench) >= len(LONG) // BLOCK * BLOCK


async def test_a_client_s_next_answer_shares_and_no_other_client_s() -> None:
    async with nodes() as (bench, _):
        first, _ = await collect(await bench.device.prepare(JOINT))
        assert adopted(bench) == 0
        await collect(await bench.device.prepare(changed(JOINT, owner="bert")))
        assert adopted(bench) == 0
        again, _ = await collect(await bench.device.prepare(JOINT))
        assert again == first and adopted(bench) >= len(LONG) // BLOCK * BLOCK
