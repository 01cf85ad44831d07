"""Shares of one node's answers and sessions: an owner or peer that wants all of them leaves some to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine, fake_model
from paceline.errors import RequestError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Vectors
from paceline.runtime import admission
from paceline.runtime import peers as peers_module
from paceline.runtime.node import PART_TEXTS, TextEmbedder
from paceline.runtime.units import UnitRegistry
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, linked, nodes

pytestmark = pytest.mark.anyio

SHORT = changed(REQUEST, max_tokens=6)
ENDLESS = changed(REQUEST, max_tokens=4000, sampling=SamplingParams(temperature=1.0, logit_bias={256: -100.0}))


async def test_a_key_with_all_the_answers_it_can_have_leaves_some_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 18)
    greedy, other = changed(REQUEST, owner="greedy"), changed(REQUEST, owner="other")
    async with nodes(linked=False) as (bench, _), AsyncExitStack() as stack:
        for _ in range(16):
            stack.push_async_callback((await bench.cloud.prepare(greedy)).aclose)
        with pytest.raises(RequestError, match=r"16 answers of 18 at most, and 16 of them for this key") as refused:
            await bench.cloud.prepare(greedy)
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        await collect(await bench.cloud.prepare(changed(SHORT, owner="other")))
        held = await bench.cloud.prepare(other)
        with pytest.raises(RequestError):
            await bench.cloud.prepare(greedy)
        await held.aclose()
        await held.aclose()  # gives back its place once
        bench.cloud._places._shares.check()
        assert bench.cloud._places._shares.taken == 16
    assert bench.cloud._places._shares.taken == 0


async def test_a_request_waits_a_little_for_a_place_that_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 1)
    monkeypatch.setattr(admission, "ROOM_S", 60.0)
    async with nodes(linked=False) as (bench, _):
        node = bench.cloud
        held = await node.prepare(REQUEST)
        waiting = [asyncio.create_task(node.wait_for_room(REQUEST.account.owner)) for _ in range(2)]
        await asyncio.sleep(0)
        await held.aclose()
        await waiting[0]
        again = await node.prepare(REQUEST)
        assert not waiting[1].done()
        waiting[1].cancel()
        await asyncio.gather(waiting[1], return_exceptions=True)
        assert not node._places._queue._calls, "who has left is not called"
        monkeypatch.setattr(admission, "ROOM_S", 0.0)
        with pytest.raises(RequestError, match="1 answers of 1 at most"):
            await node.wait_for_room(REQUEST.account.owner)
        await again.aclose()


async def test_where_no_key_is_required_nothing_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 18)
    async with nodes(linked=False) as (bench, _), AsyncExitStack() as stack:
        for _ in range(18):
            stack.push_async_callback((await bench.cloud.prepare(changed(REQUEST, owner=""))).aclose)


async def test_a_peer_has_so_many_sessions_and_its_further_answers_are_written_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "MAX_SESSIONS_PER_PEER", 1)
    async with nodes() as (bench, _):
        first = await bench.device.prepare(ENDLESS)
        events = first.run()
        await anext(events)
        _, second = await collect(await bench.device.prepare(SHORT))
        assert second.degraded == "cloud_refused" and second.completion_tokens > 0
        assert first.link is not None, "the first one keeps its session"
        await first.aclose()
        _, third = await collect(await bench.device.prepare(SHORT))
        assert third.degraded is None, "the place is free again"
        bench.cloud._peers._shares.check()


async def test_sessions_of_a_peer_have_so_many_tokens_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes() as (bench, _):
        tokens = bench.cloud._peers._tokens
        monkeypatch.setattr(tokens, "most", 1000)
        words = ({"role": "user", "content": "x" * 1100},)
        first = await bench.device.prepare(changed(ENDLESS, messages=words, max_tokens=2000))
        events = first.run()  # kept, or it would be ended
        await anext(events)
        assert first.link is not None and tokens.held("laptop") > 1000, "one session may be of any size"
        _, second = await collect(await bench.device.prepare(SHORT))
        assert second.degraded == "cloud_refused" and second.completion_tokens > 0
        await first.aclose()
        _, third = await collect(await bench.device.prepare(SHORT))
        assert third.degraded is None, "the tokens are given back"
        assert sum(bench.cloud._peers._counted.values()) == tokens.held("laptop") < 1000


async def test_texts_of_one_key_s_many_requests_are_embedded_in_turns_with_anothers() -> None:
    parts: list[str] = []

    class Noting(HashEmbedder):
        def embed(self, texts: Sequence[str]) -> Vectors:
            parts.append(texts[0])
            return super().embed(texts)

    with closing(UnitRegistry("cloud")) as units:
        embedder = TextEmbedder(Noting(), units)
        many = [asyncio.create_task(embedder.embed(["many"] * 2 * PART_TEXTS, "many")) for _ in range(8)]
        await many[0]
        before = len(parts)
        await embedder.embed(["one"], "one")
        assert parts.index("one") - before <= 2, "the part under way, and one of the other's"
        await asyncio.gather(*many)
    assert parts.count("many") == 16


async def test_texts_of_one_key_are_tokenized_one_at_a_time_and_in_turns_with_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    goes_on = threading.Semaphore(0)

    def raw(_: ByteTokenizer, text: str) -> list[int]:
        begun.append(text)
        goes_on.acquire()
        return [1]

    monkeypatch.setattr(ByteTokenizer, "raw", raw)
    async with nodes(linked=False) as (bench, _):
        waiting = {asyncio.create_task(bench.cloud.tokenize(owner, owner)) for owner in [*["many"] * 8, "one"]}
        while waiting:
            goes_on.release()
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1 and len(begun) + len(waiting) <= 10, "one more may have begun"
    assert "one" in begun[:4]


@pytest.mark.parametrize(
    ("positions", "told"), [(16, "its context of 16 tokens is too short"), (80, "its context is full")]
)
async def test_a_peer_whose_context_is_too_short_refuses_and_is_not_lost(positions: int, told: str) -> None:
    """At once, or where it is full in mid-answer."""
    small = LoadedModel(FakeEngine(2, spread=0.3, max_positions=positions), ByteTokenizer())
    asked = changed(ENDLESS, max_tokens=120, strategy="aggregate")
    async with linked(fake_model(1), small) as bench:
        _, done = await collect(await bench.cloud.prepare(asked))
        assert (done.degraded, done.completion_tokens) == ("device_refused", 120)
        assert done.strategy_reason.endswith(told)
        for on_loss in ("fail", "pause"):
            with pytest.raises(RequestError, match=told) as refused:
                await collect(await bench.cloud.prepare(changed(asked, on_loss=on_loss)))
            assert refused.value.code == "device_refused"
