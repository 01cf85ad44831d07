"""A question in parts: each is answered in turn, as if it were asked alone."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.core.side import SIDES, Side
from paceline.engine.fake import EOS, ByteTokenizer
from paceline.engine.reader.question import separate_questions
from paceline.runtime.admission import Parts
from paceline.runtime.questions import BETWEEN
from paceline.runtime.service import GenerateRequest, TextDelta
from tests.requests import changed
from tests.runtime.test_node import collect
from tests.runtime.test_nothing_found import FOUND, HELLO, LARGER_CLOUD, pair

pytestmark = pytest.mark.anyio

QUESTION = "When does the harbour library open, and what is my landlord called?"
ENDS = (32,)  # a blank, which a fake answer soon has


def asking(question: str, index: int = 0, **parts: object) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.0, seed=7).nth(index)
    messages = ({"role": "user", "content": question},)
    asked = {"messages": messages, "sampling": sampling, "stop_token_ids": ENDS, "max_tokens": 200}
    return changed(HELLO, **asked | parts)


@pytest.fixture(autouse=True)
def reads_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "one_document", False)


@pytest.mark.parametrize("front", SIDES)
async def test_each_part_is_answered_as_if_it_were_asked_alone(
    front: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, LARGER_CLOUD, monkeypatch) as (bench, _):
        node = bench.device if front == "device" else bench.cloud
        alone = [
            await collect(await node.prepare(asking(FOUND[side], index)))
            for index, side in enumerate(("cloud", "device"))
        ]
        text, done = await collect(await node.prepare(asking(QUESTION)))
        assert text == BETWEEN.join(text for text, _ in alone)
        assert done.completion_tokens == sum(part.completion_tokens for _, part in alone)
        assert {citation.side for citation in done.citations} == {
            citation.side for _, part in alone for citation in part.citations
        }
        assert (done.reason, done.degraded) == ("stop", None)
        assert done.strategy_reason.startswith("each part of the question is answered in turn: ")

        few = alone[0][1].completion_tokens + 1
        text, done = await collect(await node.prepare(asking(QUESTION, max_tokens=few)))
        assert done.completion_tokens == few and done.reason == "length", "all parts have one limit"
        assert text.startswith(alone[0][0] + BETWEEN)
        assert not node.load().answers, "every place has been given back"

        async with aclosing((await node.prepare(asking(QUESTION))).run()) as events:
            assert any([event == TextDelta(BETWEEN, 0) and node.load().answers == 1 async for event in events])

        endless = asking(QUESTION, sampling=SamplingParams(logit_bias={EOS: -100.0}), stop_token_ids=(), max_tokens=24)
        _, done = await collect(await node.prepare(changed(endless, options={"search_every": 8})))
        assert done.stats["searches"] == 3, "stretches of a part count"

        monkeypatch.setattr(node._preparation._reading, "max_tokens_default", few)
        _, done = await collect(await node.prepare(asking(QUESTION, max_tokens=None)))
        assert (done.completion_tokens, done.reason) == (few, "length"), "so do they share the setting's"


async def test_only_a_free_answer_of_documents_has_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path, LARGER_CLOUD, monkeypatch) as (bench, _):
        for differs in (
            {"strategy": "aggregate"},
            {"documents": 0},
            {"constraint": Constraint("json_object")},
            {"top_logprobs": 0},
            {"on_loss": "pause"},
            {"stop": ("\n\n",)},  # the line end between two parts may be of it
        ):
            generation = await bench.device.prepare(asking(QUESTION, **differs))
            assert not isinstance(generation, Parts), differs
            await generation.aclose()
        for template in ({}, {"enable_thinking": False}):  # as Anthropic's clients ask where they do not name it
            generation = await bench.device.prepare(asking(QUESTION, template=template))
            assert isinstance(generation, Parts)
            await generation.aclose()
        monkeypatch.setattr(ByteTokenizer, "one_document", True)  # as the demonstration's, which does so itself
        whole = await bench.device.prepare(asking(QUESTION))
        assert not isinstance(whole, Parts)
        await whole.aclose()


@pytest.mark.parametrize(
    "text",
    [
        "What is a lease?",
        "What is a lease, and when does it end?",  # refers to the first part
        "What is the rent and what else do I pay?",
        "How do vaccines work and how are they made?",
        "I rent a flat. What is the rent, and when is it due?",  # what stands before belongs to both
        "Write a poem about the sea and what is in it",
        "What does this print?\nprint(1) and what is 2?",
        "What is " + "very " * 80 + "old, and where is the harbour?",
        "Who is Ann? Where is Bob? What is the rent? When is it due?",  # more than are answered
        "Who is Ann? Where is Bob? What is the rent? What is a lease?",
        "Who wrote 'What is love, and when does love end'?",
        'What does "who is Ann? Where is Bob?" mean?',
        "Why is `a and what is b` wrong?",
        "Where did the man and the woman meet?",  # no part without other words
        "What time and where is the meeting?",
        "What are my son and my daughter called?",
        "What is the name of my landlord and where does he live?",
    ],
)
def test_what_cannot_be_asked_part_by_part_is_asked_whole(text: str) -> None:
    assert separate_questions(text) == ()


def test_parts_that_can_be_asked_alone() -> None:
    assert separate_questions(QUESTION) == tuple(FOUND.values())
    assert len(separate_questions("Who is Ann? Where is the key? What is the rent?")) == 3
