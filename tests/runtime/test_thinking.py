"""Thinking before an answer at a node: told apart from it, counted, bounded, and free of the answer's form, whichever
strategy writes it on whichever side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from paceline.core.sampling.sampler import Constraint, Thinking
from paceline.engine.base import NO_FIELDS
from paceline.engine.fake import ByteTokenizer
from paceline.runtime.service import GenerationResult, TextDelta
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.output_text import AnswerText
from paceline.strategies.registry import STRATEGIES
from tests.requests import changed
from tests.runtime.test_node import REQUEST, nodes

pytestmark = pytest.mark.anyio

MARKS = ("<think>", "</think>")
FORM = Constraint("json_schema", '{"enum": ["yes", "no"]}')
YES = changed(REQUEST, constraint=FORM, thinking_tokens=12, max_tokens=40)


class ThinkingTokenizer(ByteTokenizer):
    """Bytes, of a model whose prompts end with the mark of thinking."""

    thinking = MARKS

    def chat(
        self, messages: Sequence[Mapping[str, object]], *, template_kwargs: Mapping[str, object] = NO_FIELDS
    ) -> list[int]:
        thinks = template_kwargs.get("enable_thinking", True)
        return super().chat(messages) + self.encode("<think>\n" if thinks else "<think>\n\n</think>\n\n")


@pytest.fixture(autouse=True)
def thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.test_node.ByteTokenizer", ThinkingTokenizer)


async def told(session: ClientSession) -> tuple[list[TextDelta], GenerationResult]:
    *deltas, done = [event async for event in session.run()]
    assert isinstance(done, GenerationResult)
    return [delta for delta in deltas if isinstance(delta, TextDelta)], done


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_form_holds_behind_a_thinking_that_ends_with_its_budget(strategy: str) -> None:
    async with nodes() as (bench, _):
        for node in (bench.cloud, bench.device):
            deltas, done = await told(await node.prepare(changed(YES, strategy=strategy)))
            assert json.loads("".join(delta.text for delta in deltas if not delta.thinking)) in ("yes", "no")
            thought = "".join(delta.text for delta in deltas if delta.thinking)
            assert len(thought.encode()) in (11, 12) and "<" not in thought  # a blank at its end is of no part
            assert [delta.thinking for delta in deltas] == sorted((delta.thinking for delta in deltas), reverse=True)
            assert (done.reason, done.degraded) == ("stop", None)
            assert done.stats["reasoning_tokens"] == 12 + len(MARKS[1])
            assert done.completion_tokens > done.stats["reasoning_tokens"]


async def test_a_template_that_is_told_not_to_think_has_an_answer_alone() -> None:
    async with nodes(linked=False) as (bench, _):
        asked = changed(YES, template={"enable_thinking": False}, strategy="autoregressive")
        deltas, done = await told(await bench.cloud.prepare(asked))
        assert not any(delta.thinking for delta in deltas) and "reasoning_tokens" not in done.stats
        raw = changed(asked, messages=(), tokens=tuple(b"<think>"), constraint=None, max_tokens=8)
        assert not any(delta.thinking for delta in (await told(await bench.cloud.prepare(raw)))[0])


async def test_an_answer_that_is_cut_in_its_thinking_says_nothing() -> None:
    async with nodes(linked=False) as (bench, _):
        for constraint in (FORM, None):
            asked = changed(YES, constraint=constraint, thinking_tokens=None, strategy="autoregressive", max_tokens=9)
            deltas, done = await told(await bench.cloud.prepare(changed(asked, stop=("e", "a"), top_logprobs=1)))
            assert all(delta.thinking for delta in deltas) and (done.reason, done.stop) == ("length", "")
            assert sum(len(delta.logprobs) for delta in deltas) == sum(delta.tokens for delta in deltas) == 9


def test_a_stop_string_ends_the_answer_alone() -> None:
    text = AnswerText(ByteTokenizer(), ("four",), thinking=Thinking(*MARKS))
    pieces, settled = [], []
    for token in b"<think>two, four\n</think>\n\nIt is four.":
        found, stopped = text.push(token)
        pieces += found
        settled.append(text.length - text.settled)
        if stopped:
            break
    assert ("".join(p.text for p in pieces if p.thought), "".join(p.text for p in pieces if not p.thought)) == (
        "two, four",
        "It is ",
    )
    assert (text.stop, text.thought) == ("four", len("two, four\n</think>") + 1) and max(settled) == len("\n</think")
