"""Constraints at a node: early refusal, enforcement on both sides, finish reason of truncated answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.sampling.sampler import Constraint, Mask, SamplingParams, T
from paceline.engine.fake import EOS
from paceline.errors import RequestError
from paceline.runtime.service import GenerationResult, TextDelta
from paceline.strategies.registry import STRATEGIES
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes

pytestmark = pytest.mark.anyio

ENDS_SOON = SamplingParams(temperature=1.0, seed=5, logit_bias={EOS: 20.0})
WAYS = ("lookup_tree", "draft_verify", "aggregate")  # one side, drafts for the other, both
YES = changed(REQUEST, constraint=Constraint("json_schema", '{"enum": ["yes", "no"]}'))


async def test_an_unsupported_constraint_is_refused_before_anything_starts() -> None:
    async with nodes() as (bench, _):
        for text, sentence in (('{"type": "frob"}', "Invalid type: frob"), ("{", "not a JSON Schema")):
            with pytest.raises(RequestError, match=sentence) as refused:
                await bench.device.prepare(changed(REQUEST, constraint=Constraint("json_schema", text)))
            assert (refused.value.status, refused.value.param) == (400, "response_format")
        assert bench.device.load().answers == 0
        await collect(await bench.device.prepare(YES))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RequestError("This schema cannot be kept to: too much."), "This schema cannot be kept to: too much."),
        (ArithmeticError("nobody thought of it"), "it cannot be prepared there now"),
    ],
)
async def test_an_answer_continues_without_a_peer_that_cannot_enforce_its_constraint(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes() as (bench, _):

        def fails(_: Constraint, owner: str = "") -> Mask:  # noqa: ARG001
            raise error

        monkeypatch.setattr(bench.cloud._resources._compiling._grammars, "mask", fails)
        with caplog.at_level(logging.WARNING):
            text, done = await collect(await bench.device.prepare(YES))
        assert f"refused: {said}" in caplog.text
        assert ("Traceback" in caplog.text) == isinstance(error, ArithmeticError), "what a peer sends is no fault here"
        assert json.loads(text) in ("yes", "no")
        assert (done.reason, done.degraded) == ("stop", "cloud_refused")
        assert f"it refuses: {said}" in done.strategy_reason


async def test_an_answer_that_stops_before_its_constraint_is_satisfied_ends_with_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class DeadEndMask:
        """A mask without allowed tokens, as when the text exceeds the compiler's limits."""

        def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
            allowed = np.zeros(257, dtype=np.bool_)
            allowed[65] = len(path) < 3
            return allowed

        def complete(self, _: Sequence[int]) -> bool:
            return False

        def at_once(self, work: Callable[[], T]) -> T:
            return work()

    async with nodes(linked=False) as (bench, _):
        monkeypatch.setattr(bench.device._resources._compiling._grammars, "mask", lambda *_: DeadEndMask())
        text, done = await collect(await bench.device.prepare(YES))
        assert (text, done.reason) == ("AAA", "length")


async def test_logprobs_are_those_of_the_allowed_tokens() -> None:
    async with nodes() as (bench, _):
        session = await bench.device.prepare(changed(YES, top_logprobs=5))
        pieces = [event async for event in session.run() if isinstance(event, TextDelta)]
        chosen = [entry for piece in pieces for entry in piece.logprobs]
        first, second = chosen[:2]
        assert (first[0].token, first[0].logprob) == ('"', 0.0) and len(first[1]) == 1
        assert {each.token for each in second[1]} <= {"y", "n"}
        assert json.loads("".join(piece.text for piece in pieces)) in ("yes", "no")


# ---- where an answer ends -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_stop_token_ends_the_text_before_it_whichever_strategy_writes(strategy: str) -> None:
    async with nodes() as (bench, _):
        for node in (bench.cloud, bench.device):
            logprobs = 2 if node is bench.device else None
            asked = changed(REQUEST, strategy=strategy, top_logprobs=logprobs, max_tokens=12)
            whole, _ = await collect(await node.prepare(asked))
            stop = whole.encode()[6]
            text, done = await collect(await node.prepare(changed(asked, stop_token_ids=(stop, 0))))
            assert text == whole[: whole.index(chr(stop))]
            assert (done.reason, done.completion_tokens, done.stop) == ("stop", len(text), "")
            assert node is bench.cloud or (done.end is not None and done.end[0].bytes == (stop,))


@pytest.mark.parametrize("strategy", WAYS)
async def test_an_answer_goes_on_until_it_may_end_whichever_strategy_writes(strategy: str) -> None:
    never = Constraint("text", ignore_eos=True)
    early = Constraint("text", min_tokens=20, stop_ids=tuple(range(128)))
    async with nodes() as (bench, _):
        for node in (bench.cloud, bench.device):
            asked = changed(REQUEST, strategy=strategy, max_tokens=40, sampling=ENDS_SOON)
            assert (await collect(await node.prepare(asked)))[1].completion_tokens < 20
            _, done = await collect(await node.prepare(changed(asked, constraint=never)))
            assert (done.reason, done.completion_tokens, done.degraded) == ("length", 40, None)
            stopped = changed(asked, constraint=early, stop_token_ids=tuple(range(128)))
            _, done = await collect(await node.prepare(stopped))
            assert done.completion_tokens >= 20 and done.reason in ("stop", "length")


async def test_tokens_of_a_stop_string_are_neither_counted_nor_listed() -> None:
    async with nodes() as (bench, _):
        whole, _ = await collect(await bench.device.prepare(REQUEST))
        stop = whole[5:9]
        asked = changed(REQUEST, stop=(stop,), top_logprobs=1)
        session = await bench.device.prepare(asked)
        events = [event async for event in session.run()]
        pieces, done = [event for event in events if isinstance(event, TextDelta)], events[-1]
        text = "".join(piece.text for piece in pieces)
        assert text == whole[: whole.index(stop)] and isinstance(done, GenerationResult)
        listed = b"".join(bytes(token.bytes) for piece in pieces for token, _ in piece.logprobs)
        assert (listed.decode(), done.stop) == (text, stop)
        assert done.completion_tokens == len(text) == sum(piece.tokens for piece in pieces)


async def test_a_stop_string_before_the_least_number_of_tokens_does_not_end_the_answer() -> None:
    async with nodes() as (bench, _):
        asked = changed(REQUEST, constraint=Constraint("text", min_tokens=9))
        whole, _ = await collect(await bench.device.prepare(asked))
        text, done = await collect(await bench.device.prepare(changed(asked, stop=(whole[2:4], whole[12:15]))))
        assert len(text) >= 8 and whole.startswith(text) and whole[2:4] in text
        assert done.reason == "stop"


async def test_an_answer_of_a_form_without_a_limit_has_one() -> None:
    async with nodes() as (bench, _):
        form = Constraint("regex", "[a-z]{100,}")
        asked = changed(REQUEST, max_tokens=None, default_tokens=30, constraint=form)
        text, done = await collect(await bench.device.prepare(asked))
        assert (len(text), done.reason) == (30, "length")
