"""Sides whose models have different vocabularies: they search for each other, and one of them writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from paceline.core.side import SIDES
from paceline.errors import RequestError
from paceline.wire.codec import encode_options
from paceline.wire.messages import AggregateOptions, CloseSession, SessionFrame
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes, stores_of
from tests.wire.identities import CLOUD
from tests.wire.samples import opening

pytestmark = pytest.mark.anyio

UNLIKE = msgspec.structs.replace(CLOUD, tokenizer="another", num_weights=70)
TEXTS = {"cloud": "The harbour library opens at eight.", "device": "My landlord Velda is at the harbour library."}
ASKED = changed(REQUEST, messages=({"role": "user", "content": "harbour library"},), strategy="auto", max_tokens=24)


async def test_a_device_reads_what_both_sides_have_found_and_writes_by_itself(tmp_path: Path) -> None:
    with stores_of(tmp_path, {side: {"a.md": TEXTS[side]} for side in SIDES}) as stores:
        async with nodes(stores=stores, introduction=UNLIKE) as (bench, _):
            private = changed(ASKED, privacy="answer-private")
            expected, _ = await collect(await bench.device.prepare(private))
            text, done = await collect(await bench.device.prepare(ASKED))
            assert (text, done.degraded, done.strategy) == (expected, None, "lookup_tree")
            assert {citation.side for citation in done.citations} == set(SIDES)
            assert done.strategy_reason.startswith("the two models have different vocabularies")
            assert not bench.device.model_status("").is_joint and not bench.cloud.model_status("").is_joint
            near = changed(ASKED, privacy="local-only")
            assert {citation.side for citation in (await collect(await bench.device.prepare(near)))[1].citations} == {
                "device"
            }
            _, done = await collect(await bench.device.prepare(changed(ASKED, strategy="aggregate")))
            assert (done.strategy, done.degraded) == ("lookup_tree", "cloud_missing")
            text, done = await collect(await bench.cloud.prepare(ASKED))
            assert (done.degraded, {citation.side for citation in done.citations}) == ("device_missing", {"cloud"})
            with pytest.raises(
                RequestError, match="The device takes no part, as the two models have different vocabularies, and"
            ):
                await bench.cloud.prepare(changed(ASKED, on_loss="fail"))


async def test_ids_of_another_vocabulary_are_never_read() -> None:
    async with nodes(introduction=UNLIKE) as (bench, _):
        assert bench.links is not None
        link, closed = bench.links[1], asyncio.Event()
        seen: list[SessionFrame] = []

        def received(message: SessionFrame) -> None:
            seen.append(message)
            closed.set()

        number = link.open_session(received)
        options = encode_options(AggregateOptions(aggregator="coin"))
        asked = {"strategy": "aggregate", "options": options, "targets": [1, 2], "constraint": None}
        link.send(msgspec.structs.replace(opening(number), **asked))
        await closed.wait()
        assert isinstance(seen[0], CloseSession) and "does not know 'aggregate'" in seen[0].reason
