"""Constraints at a node: early refusal, enforcement on both sides, finish reason of truncated answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.sampling.constraint import Constraint, Mask, T
from paceline.errors import RequestError
from paceline.runtime.service import TextDelta
from paceline.strategies.registry import STRATEGIES
from tests.runtime.test_node import REQUEST, collect, nodes

pytestmark = pytest.mark.anyio

YES = replace(REQUEST, constraint=Constraint("json_schema", '{"enum": ["yes", "no"]}'))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_answer_satisfies_its_constraint_on_either_side(strategy: str) -> None:
    async with nodes() as (bench, _):
        for node in (bench.cloud, bench.device):
            text, done = await collect(await node.prepare(replace(YES, strategy=strategy)))
            assert json.loads(text) in ("yes", "no")
            assert (done.reason, done.degraded, done.strategy) == ("stop", None, strategy)


async def test_an_unsupported_constraint_is_refused_before_anything_starts() -> None:
    async with nodes() as (bench, _):
        for text, sentence in (('{"type": "frob"}', "Invalid type: frob"), ("{", "not a JSON Schema")):
            with pytest.raises(RequestError, match=sentence) as refused:
                await bench.device.prepare(replace(REQUEST, constraint=Constraint("json_schema", text)))
            assert (refused.value.status, refused.value.param) == (400, "response_format")
        assert bench.device.num_answers == 0
        await collect(await bench.device.prepare(YES))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RequestError("This schema cannot be kept to: too much."), "This schema cannot be kept to: too much."),
        (ArithmeticError("nobody thought of it"), "its constraint cannot be kept here"),
    ],
)
async def test_an_answer_continues_without_a_peer_that_cannot_enforce_its_constraint(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes() as (bench, _):

        def fails(_: Constraint) -> Mask:
            raise error

        monkeypatch.setattr(bench.cloud._resources._compiling._grammars, "mask", fails)
        with caplog.at_level(logging.WARNING):
            text, done = await collect(await bench.device.prepare(YES))
        assert f"refused: {said}" in caplog.text
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
        monkeypatch.setattr(bench.device._resources._compiling._grammars, "mask", lambda _: DeadEndMask())
        text, done = await collect(await bench.device.prepare(YES))
        assert (text, done.reason) == ("AAA", "length")


async def test_logprobs_are_those_of_the_allowed_tokens() -> None:
    async with nodes() as (bench, _):
        session = await bench.device.prepare(replace(YES, top_logprobs=5))
        pieces = [event async for event in session.run() if isinstance(event, TextDelta)]
        chosen = [entry for piece in pieces for entry in piece.logprobs]
        first, second = chosen[:2]
        assert (first[0].token, first[0].logprob) == ('"', 0.0) and len(first[1]) == 1
        assert {each.token for each in second[1]} <= {"y", "n"}
        assert json.loads("".join(piece.text for piece in pieces)) in ("yes", "no")
