"""Openings of a peer that is hostile, or of another version: refused by name, and the link stays."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from paceline.runtime.peers import _clamp
from paceline.wire.codec import encode_options
from paceline.wire.messages import AggregateOptions, CloseSession, DraftLimits, Options, SessionFrame
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes
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
