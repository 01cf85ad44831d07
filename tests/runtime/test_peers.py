"""Openings of a peer that is hostile, or of another version or vocabulary: refused by name, and the link stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from paceline.core.side import SIDES
from paceline.errors import RequestError
from paceline.runtime.peers import _clamp
from paceline.wire.codec import encode_options
from paceline.wire.messages import AggregateOptions, CloseSession, DraftLimits, Options, SessionFrame
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes, stores_of
from tests.wire.samples import opening

pytestmark = pytest.mark.anyio


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


BAD = {
    "no array": (raw({"drafting": 1}), "options of 'aggregate' cannot be read"),
    "a writer that is no side": (
        raw([True, [1, 1, 1, False], "mixture", False, 8, "client"]),
        "options of 'aggregate' cannot be read",
    ),
    "beyond a limit": (raw([True, [65, 1, 1, False], "mixture", False]), "options of 'aggregate' cannot be read"),
    "an aggregator it does not know": (encode_options(AggregateOptions(aggregator="sum")), "aggregator 'sum'"),
    "searches that no client can ask for": (
        encode_options(AggregateOptions(aggregator="coin", search_every=7)),
        "search again after 7 tokens",
    ),
    "no aggregator": (encode_options(Options()), "aggregator ''"),
}


async def test_options_that_cannot_be_used_are_refused() -> None:
    async with nodes() as (bench, _), asyncio.timeout(30):
        assert bench.links is not None
        device, _ = bench.links

        def ask(options: msgspec.Raw) -> asyncio.Future[SessionFrame]:
            answered: asyncio.Future[SessionFrame] = asyncio.get_running_loop().create_future()
            number = device.open_session(lambda message: answered.done() or answered.set_result(message))
            device.send(msgspec.structs.replace(opening(number), options=options, constraint=None))
            return answered

        for case, (options, reason) in BAD.items():
            message = await ask(options)
            assert isinstance(message, CloseSession) and message.reason.startswith("refused: "), case
            assert reason in message.reason, case
        _, done = await collect(await bench.device.prepare(changed(REQUEST, max_tokens=4)))
        assert done.degraded is None and done.strategy == "aggregate"
        ask(msgspec.Raw(b"\xc1"))  # no MessagePack: the frame itself is broken
        await device.closed.wait()


def test_a_peer_asks_for_no_more_drafts_than_this_side_makes_for_itself() -> None:
    assert _clamp(DraftLimits(64, 256, 256, True)) == DraftLimits(4, 16, 32, True)
    assert _clamp(DraftLimits(1, 1, 0)) == DraftLimits(1, 1, 0)


# ---- sides whose models have different vocabularies: they search for each other, and one of them writes -------------
TEXTS = {"cloud": "The harbour library opens at eight.", "device": "My landlord Velda is at the harbour library."}
ASKED = changed(REQUEST, messages=({"role": "user", "content": "harbour library"},), strategy="auto", max_tokens=24)


async def test_a_device_reads_what_both_sides_have_found_and_writes_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stores_of(tmp_path, {side: {"a.md": TEXTS[side]} for side in SIDES}) as stores:
        async with nodes(stores=stores, words="another", sizes={"cloud": 70}) as (bench, _):
            assert caplog.text.count("no answer is written together with") == 2, "at both sides"
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
    async with nodes(words="another") as (bench, _):
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
