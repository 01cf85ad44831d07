"""Nodes of further models beside a linked one: joined where the tokenizer is the link's, else alone with the reason."""

from __future__ import annotations

import pytest

from paceline.engine.fake import fake_model
from paceline.errors import RequestError
from paceline.runtime.node import Node
from paceline.runtime.resources import Company, NodeParts
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes

pytestmark = pytest.mark.anyio


async def test_a_model_that_was_there_before_the_link_joins_and_is_told_of_its_loss() -> None:
    async with nodes(linked=False) as (bench, tasks):
        further = Node("device", fake_model(7), None, beside=bench.device.beside(joins=True, alone=str))
        async with further:
            await bench.link(tasks)
            text, done = await collect(await further.prepare(REQUEST))
            first, _ = await collect(await bench.device.prepare(REQUEST))
            assert (done.strategy, done.degraded) == ("aggregate", None)
            assert text != first
            cut = await further.prepare(REQUEST)
            events = cut.run()
            await anext(events)
            await bench.unlink()
            last = [event async for event in events][-1]
            assert getattr(last, "degraded", None) == "cloud_lost"


async def test_a_model_that_has_gone_is_told_of_no_link_any_more() -> None:
    async with nodes() as (bench, _):
        async with Node("device", fake_model(7), None, beside=bench.device.beside(joins=True, alone=str)) as further:
            await collect(await further.prepare(REQUEST))
        _, done = await collect(await bench.device.prepare(REQUEST))
        assert (done.strategy, done.degraded) == ("aggregate", None), "the link is the first node's"


async def test_a_model_with_another_tokenizer_writes_alone_and_says_why() -> None:
    async with nodes() as (bench, _):
        beside = bench.device.beside(joins=False, alone=lambda: "it has another tokenizer")
        async with Node(
            "device", fake_model(7), None, NodeParts(company=Company(expects_peer=lambda: True)), beside=beside
        ) as further:
            _, done = await collect(await further.prepare(REQUEST))
            assert done.strategy_reason == "the cloud is not asked: it has another tokenizer"
            assert done.degraded == "cloud_refused"
            with pytest.raises(RequestError, match="The cloud takes no part: it has another tokenizer") as refused:
                await further.prepare(changed(REQUEST, on_loss="fail"))
            assert refused.value.code == "model_writes_alone"
