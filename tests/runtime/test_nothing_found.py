"""Where neither side has found a document one side writes, that of the larger model, and the text is its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.core.side import SIDES, Side, other
from paceline.engine.fake import EOS
from paceline.errors import RequestError
from paceline.runtime import peers
from paceline.runtime.service import GenerateRequest, GenerationResult, TextDelta
from paceline.runtime.sessions.base import MaskThreads
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.prompts import PromptSet
from paceline.wire.messages import RetrievedPassages, SessionFrame, Targets
from tests.requests import changed
from tests.runtime.test_node import REQUEST, Bench, collect, nodes, stores_of

pytestmark = pytest.mark.anyio

TEXTS = {"cloud": "The harbour library opens at eight.", "device": "My landlord is called Velda."}
HELLO = changed(REQUEST, messages=({"role": "user", "content": "hello"},), strategy="auto", max_tokens=24)
FOUND = {"cloud": "When does the harbour library open?", "device": "What is my landlord called?"}
SAMPLINGS = {
    "seeded": (SamplingParams(temperature=1.0, seed=5, logit_bias={EOS: -100.0}), True),
    "unseeded": (SamplingParams(temperature=1.0, seed=6, logit_bias={EOS: -100.0}), False),
    "greedy": (SamplingParams(temperature=0.0, logit_bias={EOS: -100.0}), False),
}


Sizes = Mapping[Side, int]
LARGER_CLOUD, LARGER_DEVICE, EQUAL = (
    {"cloud": cloud, "device": device} for cloud, device in ((70, 10), (10, 70), (10, 10))
)
SIZES: Sequence[Sizes] = (LARGER_CLOUD, LARGER_DEVICE, EQUAL, {}, {"cloud": 70})


def writer(sizes: Sizes, front: Side) -> Side:
    """The side with the larger model, if it is known which that is."""
    if len(sizes) < 2 or sizes["cloud"] == sizes["device"]:
        return front
    return max(SIDES, key=lambda side: sizes[side])


@asynccontextmanager
async def pair(
    folder: Path, sizes: Sizes, *, gated: tuple[Side, ...] = ()
) -> AsyncIterator[tuple[Bench, asyncio.TaskGroup]]:
    """Two nodes with a document each."""
    with stores_of(folder, {side: {"a.md": TEXTS[side]} for side in SIDES}) as stores:
        async with nodes(stores=stores, sizes=sizes, gated=gated) as made:
            yield made


async def alone(bench: Bench, side: Side, request: GenerateRequest) -> str:
    """The text that this side writes by itself."""
    text, _ = await collect(await bench.of(side).prepare(changed(request, strategy="autoregressive")))
    return text


@pytest.mark.parametrize("front", SIDES)
async def test_the_larger_models_side_writes_alone_and_the_report_says_so(front: Side, tmp_path: Path) -> None:
    """With every sampling where a side is larger; with one where none is."""
    for number, (sizes, sampling) in enumerate([*product(SIZES[:2], SAMPLINGS), *product(SIZES[2:], ["seeded"])]):
        params, seeded = SAMPLINGS[sampling]
        request = changed(HELLO, sampling=params, seeded=seeded, max_tokens=12)
        larger = writer(sizes, front)
        async with pair(tmp_path / str(number), sizes) as (bench, _):
            text, done = await collect(await bench.of(front).prepare(request))
            assert text == await alone(bench, larger, request), (sizes, sampling)
            assert (done.degraded, done.citations, done.completion_tokens) == (None, (), 12)
            if larger == front:
                assert done.strategy == "lookup_tree"
                assert done.strategy_reason == (
                    f"neither side has found anything, and the {front} writes: no other model is known to be larger"
                )
                assert done.stats["cached_tokens"] == 0, "its prompt was computed, if twice"
            elif front == "device":
                assert done.strategy == "draft_verify"
                assert done.strategy_reason == "nothing private is in the context, and the cloud's model is larger"
            else:
                assert done.strategy == "aggregate"
                reason = "neither side has found anything, and the device writes: its model is larger"
                assert done.strategy_reason.endswith(reason)


@pytest.mark.parametrize(("front", "side"), [*product(SIDES, SIDES)])
async def test_what_one_side_alone_has_found_is_written_by_the_fastest_way_to_its_text(
    front: Side, side: Side, tmp_path: Path
) -> None:
    request = changed(HELLO, messages=({"role": "user", "content": FOUND[side]},))
    async with pair(tmp_path, EQUAL) as (bench, _):
        text, done = await collect(await bench.of(front).prepare(request))
        ways = {("device", "cloud"): "draft_verify", ("cloud", "device"): "aggregate"}
        assert (done.strategy, done.degraded) == (ways.get((front, side), "lookup_tree"), None)
        assert "neither side" not in done.strategy_reason
        assert ("alone has found something" in done.strategy_reason) == (front == side)
        assert {citation.side for citation in done.citations} == {side}
        assert text == await alone(bench, side, request)


@pytest.mark.parametrize("front", SIDES)
async def test_what_both_sides_have_found_alike_is_cited(
    front: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither decides a token more than the other."""
    monkeypatch.setitem(TEXTS, "device", TEXTS["cloud"])
    request = changed(HELLO, messages=({"role": "user", "content": FOUND["cloud"]},))
    async with pair(tmp_path, EQUAL) as (bench, _):
        cloud, device = bench.engines["cloud"], bench.engines["device"]
        device._key, device._base_model = cloud._key, cloud._base_model  # one model on both sides
        _, done = await collect(await bench.of(front).prepare(request))
        assert done.strategy == "aggregate" and {citation.side for citation in done.citations} == set(SIDES)


async def test_who_names_the_strategy_gets_both_models_and_is_told(tmp_path: Path) -> None:
    request = changed(HELLO, strategy="aggregate")
    async with pair(tmp_path, LARGER_CLOUD) as (bench, _):
        texts = set()
        for node in (bench.cloud, bench.device):
            text, done = await collect(await node.prepare(request))
            texts.add(text)
            assert done.strategy == "aggregate"
            assert done.strategy_reason.endswith("neither side has found anything, and both write, as the request asks")
        assert len(texts) == 1
        assert not texts & {await alone(bench, side, request) for side in SIDES}


async def test_a_form_is_kept_by_the_side_that_writes(tmp_path: Path) -> None:
    form = Constraint("json_schema", '{"type": "string", "pattern": "^[a-d]{10}$"}')
    request = changed(HELLO, constraint=form)
    for number, (front, sizes) in enumerate(product(SIDES, (LARGER_CLOUD, LARGER_DEVICE))):
        async with pair(tmp_path / str(number), sizes) as (bench, _):
            text, done = await collect(await bench.of(front).prepare(request))
            assert text == await alone(bench, writer(sizes, front), request)
            assert len(json.loads(text)) == 10 and set(text) <= set('"abcd') and done.degraded is None


@pytest.mark.parametrize("front", SIDES)
@pytest.mark.parametrize("on_loss", ["continue", "pause", "fail"])
async def test_a_side_that_writes_alone_needs_the_other_no_more(front: Side, on_loss: str, tmp_path: Path) -> None:
    sizes = LARGER_CLOUD if front == "cloud" else LARGER_DEVICE
    request = changed(HELLO, on_loss=on_loss)  # type: ignore[arg-type]  # one of them
    async with pair(tmp_path, sizes, gated=(front,)) as (bench, tasks):
        node, engine = bench.of(front), bench.engines[front]
        session = await node.prepare(request)
        events = asyncio.create_task(collect(session))
        while session.prepared.strategy != "lookup_tree":  # the peer has said that it found nothing
            await asyncio.sleep(0)
        assert not bench.of(other(front))._peers.busy or not session.link
        await bench.unlink()
        await bench.link(tasks)
        engine.release_gate()
        text, done = await events
        assert (done.strategy, done.degraded) == ("lookup_tree", None)
        assert text == await alone(bench, front, request)


@pytest.mark.parametrize(("front", "tokens"), [*product(SIDES, (0, 1, 9))])
async def test_a_larger_peer_that_is_lost_and_comes_back_goes_on_writing(
    front: Side, tokens: int, tmp_path: Path
) -> None:
    sizes = LARGER_DEVICE if front == "cloud" else LARGER_CLOUD
    request = changed(HELLO, on_loss="pause")
    async with pair(tmp_path, sizes) as (bench, tasks):
        expected = await alone(bench, other(front), request)
        events = (await bench.of(front).prepare(request)).run()
        text = ""
        for _ in range(tokens):
            delta = await anext(events)
            assert isinstance(delta, TextDelta)
            text += delta.text
        await bench.unlink()
        await bench.link(tasks)
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            else:
                assert isinstance(event, GenerationResult) and event.degraded is None
    assert text == expected


@pytest.mark.parametrize("front", SIDES)
async def test_a_peer_lost_before_it_has_searched_is_missed(front: Side, tmp_path: Path) -> None:
    """It may have found something: the answer is marked, and fails where it is to."""
    async with pair(tmp_path, EQUAL) as (bench, _):
        link = bench.links[0 if front == "cloud" else 1]
        link.on_open = lambda _: [end.abort() for end in bench.pipes_in_use]  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="was lost") as lost:
            await collect(await bench.of(front).prepare(changed(HELLO, on_loss="fail")))
        assert (lost.value.status, lost.value.code) == (503, f"{other(front)}_lost")
    async with pair(tmp_path / "again", EQUAL) as (bench, _):
        link = bench.links[0 if front == "cloud" else 1]
        link.on_open = lambda _: [end.abort() for end in bench.pipes_in_use]  # type: ignore[union-attr]
        text, done = await collect(await bench.of(front).prepare(HELLO))
        assert done.degraded == f"{other(front)}_lost" and text == await alone(bench, front, HELLO)


@pytest.mark.parametrize(("front", "found"), [*product(SIDES, (False, True))])
async def test_what_is_its_own_if_the_peer_finds_nothing_is_written_while_that_searches(
    front: Side, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And told to nobody before, whether it is needed or not."""
    searched, build = asyncio.Event(), peers.Peers._prompts

    async def searching(*arguments: Any, **more: Any) -> PromptSet:
        await searched.wait()
        return await build(*arguments, **more)

    monkeypatch.setattr(peers.Peers, "_prompts", searching)
    asked = FOUND[other(front)] if found else "hello"
    request = changed(HELLO, messages=({"role": "user", "content": asked},))
    async with pair(tmp_path, LARGER_CLOUD if front == "cloud" else LARGER_DEVICE) as (bench, _):
        expected = await alone(bench, other(front) if found else front, request)
        session = await bench.of(front).prepare(request)
        assert isinstance(session, ClientSession)
        events = asyncio.create_task(collect(session))
        while session._ahead is None or session._ahead._finished is None:
            await asyncio.sleep(0)
        assert not events.done() and not session.written.tokens
        searched.set()
        text, done = await events
        assert (text, done.degraded, done.completion_tokens) == (expected, None, 24)
        assert (done.strategy == "lookup_tree") == (not found)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_peer_is_left_whose_tokens_come_while_a_mask_is_waited_for(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the device's from its first token on, though the machine cannot be left within an event."""
    held: list[Callable[[], None]] = []
    heard: list[SessionFrame] = []
    submit, received = MaskThreads.submit, ClientSession._received

    def held_back(threads: MaskThreads, owner: str, work: Callable[[], object], done: Callable[[], None]) -> None:
        now = partial(submit, threads, owner, work, done)
        held.append(now) if threads.worker is bench.device._resources.worker else now()

    def heard_too(session: ClientSession, message: SessionFrame) -> None:
        received(session, message)
        heard.append(message)

    request = changed(HELLO, constraint=Constraint("json_schema", '{"type": "string", "pattern": "^[a-d]{10}$"}'))
    async with pair(tmp_path, LARGER_DEVICE) as (bench, _):
        expected = await alone(bench, "device", request)
        assert expected != await alone(bench, "cloud", request)
        monkeypatch.setattr(ClientSession, "_received", heard_too)
        monkeypatch.setattr(MaskThreads, "submit", held_back)
        events = asyncio.create_task(collect(await bench.device.prepare(request)))
        async with asyncio.timeout(30):
            while len(heard) < 2:
                await asyncio.sleep(0)
        assert isinstance(heard[0], RetrievedPassages) and isinstance(heard[1], Targets) and held
        if lost:
            await bench.unlink()
        monkeypatch.setattr(MaskThreads, "submit", submit)
        for each in held:
            each()
        text, done = await events
        assert (text, done.degraded) == (expected, None)
