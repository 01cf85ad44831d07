"""`auto` has a larger cloud verify what its device drafts, as long as answers are no slower so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from paceline.engine.fake import FakeEngine
from paceline.runtime.resources import Resources
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Introduction
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes
from tests.wire.identities import CLOUD

pytestmark = pytest.mark.anyio

ASKED = changed(REQUEST, strategy="auto", documents=0)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models have ten weights, the device's takes 20 ms a token."""
    make = FakeEngine.__init__

    def sized(engine: FakeEngine, *arguments: Any, **more: Any) -> None:
        make(engine, *arguments, **more)
        engine._info = replace(engine._info, num_weights=10)

    monkeypatch.setattr(FakeEngine, "__init__", sized)
    monkeypatch.setattr(Resources, "decode_s", 0.02)


def cloud(decode_us: int) -> Introduction:
    """Of a cloud whose model has seven times as many weights as the device's."""
    return msgspec.structs.replace(CLOUD, num_weights=70, decode_us=decode_us)


async def test_the_first_answer_goes_by_what_the_cloud_says_and_later_ones_by_what_was_measured() -> None:
    async with nodes(introduction=cloud(20_000)) as (bench, _):
        _, done = await collect(await bench.device.prepare(ASKED))
        assert (done.strategy, done.degraded) == ("draft_verify", None)
        strategy = STRATEGIES["draft_verify"]
        pace = bench.device._resources.stats(strategy, strategy.options(), ASKED.sampling).offload.pace
        now = asyncio.get_running_loop().time()
        assert pace.recent(now) is not None
        pace.add(10.0, now)  # the link has become slow
        _, done = await collect(await bench.device.prepare(ASKED))
        assert done.strategy == "lookup_tree"


async def test_a_slower_cloud_is_not_asked() -> None:
    async with nodes(introduction=cloud(20_001)) as (bench, _):
        _, done = await collect(await bench.device.prepare(ASKED))
        assert done.strategy == "lookup_tree"
