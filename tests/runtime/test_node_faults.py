"""Two nodes with slow searches, short contexts, silent peers and lost links, as seen by the client."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from paceline.core.fair import Shares
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, fake_model
from paceline.errors import PacelineError, StorageError
from paceline.runtime.service import GenerationResult, TextDelta
from paceline.runtime.sessions import client as client_module
from paceline.strategies import joint
from paceline.wire.codec import decode
from paceline.wire.messages import Drafts, OpenSession
from tests.requests import changed
from tests.runtime.test_node import (
    HARBOUR,
    LANDLORD,
    REQUEST,
    Bench,
    GatedEngine,
    Passages,
    collect,
    linked,
    nodes,
    stores_of,
)

pytestmark = pytest.mark.anyio

ENDLESS = SamplingParams(temperature=1.0, seed=1, logit_bias={256: -100.0})


@asynccontextmanager
async def short_device(max_positions: int) -> AsyncIterator[Bench]:
    """Linked nodes; the device's context is shorter than the cloud's."""
    engine = GatedEngine(2, max_positions)
    engine.open = True
    async with linked(fake_model(1, 0.3), LoadedModel(engine, ByteTokenizer())) as bench:
        yield bench
    assert not engine.held(), "blocks leaked"


def silence_cloud(bench: Bench) -> None:
    """Make the cloud accept the device's sessions and send no messages."""
    assert bench.links is not None
    link = bench.links[1]

    def take_part(opening: OpenSession) -> None:
        link.attach(opening.session, lambda _: None)

    link.on_open = take_part


async def test_a_slow_search_on_the_device_changes_no_text() -> None:
    texts: list[str] = []
    async with nodes() as (bench, _):
        bench.have(Passages(LANDLORD), Passages(HARBOUR))
        for node in (bench.cloud, bench.device):
            texts.append((await collect(await node.prepare(REQUEST)))[0])
    async with nodes() as (bench, _):
        may_search = threading.Event()
        bench.have(Passages(LANDLORD, wait_for=may_search), Passages(HARBOUR))
        assert bench.pipes_in_use is not None
        end, drafts = bench.pipes_in_use[0], 0
        receive = end.recv_bytes

        async def counted() -> bytes:
            """Each call implies that the message of the previous call has been processed."""
            nonlocal drafts
            if drafts >= 4:
                may_search.set()
            data = await receive()
            drafts += isinstance(decode(data), Drafts)
            return data

        end.recv_bytes = counted  # type: ignore[method-assign]  # to count drafts
        # It waits however slow this machine is; else a silence of seconds has the cloud go on alone.
        text, done = await collect(await bench.cloud.prepare(changed(REQUEST, on_loss="pause")))
        assert drafts >= 4 and done.degraded is None
        texts.append(text)
    assert len(set(texts)) == 1, texts


async def test_a_device_with_a_shorter_context_leaves_without_affecting_its_own_answers() -> None:
    joint = changed(REQUEST, max_tokens=60, sampling=ENDLESS)
    local = changed(joint, max_tokens=5, strategy="autoregressive")
    async with short_device(60) as bench:
        answer = asyncio.ensure_future(collect(await bench.cloud.prepare(joint)))
        num_local = 0
        while not answer.done():  # so that one is running when the joint answer reaches the end of the context
            _, done = await collect(await bench.device.prepare(local))
            assert (done.completion_tokens, done.degraded) == (5, None)
            num_local += 1
        _, done = await answer
        assert num_local > 2
        assert (done.completion_tokens, done.reason, done.degraded) == (60, "length", "device_refused")
        assert 0 < done.stats["alone"] < 60  # the device took part until then


async def test_a_conversation_too_long_for_the_peer_is_answered_without_it() -> None:
    async with short_device(30) as bench:
        assert bench.links is not None
        _, done = await collect(await bench.cloud.prepare(changed(REQUEST, max_tokens=5, sampling=ENDLESS)))
        assert (done.completion_tokens, done.degraded) == (5, "device_refused")
        assert bench.links[1].accepting


async def test_a_conversation_too_long_for_a_frame_does_not_cut_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenSession, "max_bytes", 2048)
    long = changed(REQUEST, messages=({"role": "user", "content": "x" * 3000},), max_tokens=3, sampling=ENDLESS)
    async with nodes() as (bench, _):
        assert bench.links is not None
        _, done = await collect(await bench.device.prepare(long))
        assert (done.completion_tokens, done.degraded) == (3, "cloud_lost")
        assert not any(link.closed.is_set() for link in bench.links)
        _, done = await collect(await bench.device.prepare(REQUEST))
        assert done.degraded is None


async def test_a_link_that_replaces_a_dead_one_resumes_the_session(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.node")
    async with nodes(gated=("device",)) as (bench, tasks):
        engine = bench.engines["device"]
        session = await bench.cloud.prepare(changed(REQUEST, sampling=ENDLESS))
        events = session.run()
        engine.gate.release()  # the device's prefill: with the cloud's first draft it decides a target
        assert isinstance(await anext(events), TextDelta)
        old, session_link = bench.links, session.link
        await bench.link(tasks)  # the device has reconnected, and its old link still looks alive to the cloud
        assert "the link with laptop is down: another takes its place" in caplog.text
        assert old is not None and bench.links is not None
        assert session_link is old[1] and session.link is bench.links[1]
        for link in old:
            await link.close()
        assert session.link is bench.links[1]
        engine.release_gate()
        done = [event async for event in events][-1]
        assert isinstance(done, GenerationResult) and done.completion_tokens == 24
        # Alone it wrote at most its own drafts, then both sides continued together.
        assert done.stats["alone"] <= 16 and done.stats["drafted"] > 10


@pytest.mark.parametrize("on_loss", ["continue", "fail", "pause"])
async def test_a_peer_without_a_word_counts_as_lost(on_loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "LISTEN_S", 0.01)
    monkeypatch.setattr(joint, "LONGEST_FIRST_S", 0.05)
    monkeypatch.setattr(client_module, "PAUSE_S", 0.01)
    async with nodes() as (bench, _):
        silence_cloud(bench)
        (name,) = bench.device._peers.links
        bench.device._peers.records[name].first_s = 0.05
        request = changed(REQUEST, max_tokens=4, sampling=ENDLESS)
        session = await bench.device.prepare(changed(request, on_loss=on_loss))
        if said := {"fail": "not to go on alone", "pause": "has not come back within"}.get(on_loss):
            with pytest.raises(PacelineError, match=said):  # after a pause: a link that has died silently may return
                await collect(session)
        else:
            _, done = await collect(session)
            assert (done.completion_tokens, done.degraded) == (4, "cloud_lost")


async def test_a_paused_answer_continues_with_the_same_text() -> None:
    request = changed(REQUEST, max_tokens=12, sampling=ENDLESS, on_loss="pause")
    async with nodes() as (bench, tasks):
        expected, _ = await collect(await bench.device.prepare(request))
        for length in (0, 1, 5, 11):
            session = await bench.device.prepare(request)
            events, text = session.run(), ""
            while len(text.encode()) < length:
                delta = await anext(events)
                assert isinstance(delta, TextDelta)
                text += delta.text
            await bench.unlink()
            waiting = asyncio.ensure_future(anext(events))
            await bench.link(tasks)
            event = await waiting
            while isinstance(event, TextDelta):
                text += event.text
                event = await anext(events)
            assert isinstance(event, GenerationResult) and text == expected
            assert event.degraded is None and event.stats["alone"] == 0


async def test_a_link_that_comes_and_goes_does_not_prolong_a_pause() -> None:
    async with nodes(gated=("cloud",)) as (bench, tasks):
        session = await bench.device.prepare(changed(REQUEST, on_loss="pause"))
        events = session.run()
        waiting = asyncio.ensure_future(anext(events))
        await bench.unlink()
        first = session._pause
        assert first is not None and not first.cancelled()
        await bench.link(tasks)
        await bench.unlink()
        assert session._pause is first and not first.cancelled()
        waiting.cancel()
        await session.aclose()
        assert first.cancelled()


async def test_an_answer_does_not_pause_for_a_linked_peer_that_refuses() -> None:
    async with nodes() as (bench, _):
        bench.cloud._peers._shares = Shares(0)
        session = await bench.device.prepare(changed(REQUEST, on_loss="pause"))
        with pytest.raises(PacelineError, match="not to go on alone"):
            await collect(session)


@pytest.mark.parametrize("method", ["search", "removals", "count"])
async def test_a_peer_whose_documents_cannot_be_read_refuses_at_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tells nothing of why: an error may name files."""
    with stores_of(tmp_path, {"cloud": {"keys.md": "The key is under the broom."}}) as stores:
        async with nodes(stores=stores) as (bench, _):
            answer = await bench.device.prepare(REQUEST)
            monkeypatch.setattr(stores["cloud"], method, Mock(side_effect=StorageError("/secret cannot be read")))
            _, done = await collect(answer)
            assert done.degraded == "cloud_refused" and done.strategy_reason.endswith("cannot be prepared there now")


async def test_a_link_lost_before_the_answer_begins_counts_as_lost() -> None:
    async with nodes() as (bench, _):
        lenient = await bench.device.prepare(REQUEST)
        strict = await bench.device.prepare(changed(REQUEST, on_loss="fail"))
        await bench.unlink()
        _, done = await collect(lenient)
        assert done.degraded == "cloud_lost" and done.completion_tokens > 0
        with pytest.raises(PacelineError, match="not to go on alone"):
            await collect(strict)


async def test_a_link_lost_and_back_before_the_answer_begins_leaves_no_session_behind() -> None:
    async with nodes() as (bench, tasks):
        session = await bench.device.prepare(REQUEST)
        await bench.unlink()
        await bench.link(tasks)
        assert bench.links is not None
        opened: list[int] = []
        take_part = bench.links[1].on_open
        assert take_part is not None

        def counted(opening: OpenSession) -> None:
            opened.append(opening.session)
            take_part(opening)

        bench.links[1].on_open = counted
        _, done = await collect(session)
        assert len(opened) == 1 and done.stats["alone"] == 0
