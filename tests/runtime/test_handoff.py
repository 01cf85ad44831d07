"""A device that begins by itself what its cloud's larger model is to write: its text up to some token, the cloud's
behind it, and nothing that leaves it before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.core.difficulty import HELD, Look, Sureness
from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.core.side import Side
from paceline.engine.fake import EOS, ByteTokenizer, FakeEngine
from paceline.runtime.preparation import Preparation
from paceline.runtime.service import GenerateRequest, GenerationResult, TextDelta
from paceline.runtime.sessions import handoff
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.handoff import Outcomes
from paceline.strategies.base import Branch
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes
from tests.strategies.oracle import continued_alone

pytestmark = pytest.mark.anyio

LENGTH = 20
ASKED = changed(
    REQUEST,
    strategy="auto",
    max_tokens=LENGTH,
    documents=0,
    handoff="balanced",
    sampling=SamplingParams(temperature=1.0, seed=5, logit_bias={EOS: -100.0}),
)
SEEDS: dict[Side, int] = {"cloud": 1, "device": 2}  # of the engines of `nodes`
NEVER = 10_000
pair = partial(nodes, sizes={"cloud": 70, "device": 10})


def unsure_at(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Have the device be sure of every token before this one, and of none from it on."""
    monkeypatch.setattr(Sureness, "look", lambda self, *_: Look(1.0 if self.tokens <= token else 0.0, 10.0))


def reference(request: GenerateRequest, side: Side, prefix: tuple[int, ...] = ()) -> list[int]:
    """Tokens of the text that this side's model writes behind the prefix."""
    prompt = ByteTokenizer().chat([*request.prompt.messages])
    engine, branches = FakeEngine(seed=SEEDS[side], spread=0.3), (Branch(tuple(prompt), None),)
    return continued_alone(
        engine, branches, prefix, request.wish.sampling, request.output.max_tokens or 0, frozenset({EOS})
    )


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_text_is_the_devices_up_to_where_it_grows_unsure_and_the_clouds_behind(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every token; what it is unsure of before it has told anything is the cloud's from the first one on."""
    request = changed(ASKED, sampling=replace(ASKED.wish.sampling, temperature=temperature))
    alone = reference(request, "device")
    async with pair() as (bench, _):
        for at in range(LENGTH):
            unsure_at(monkeypatch, at)
            text, done = await collect(await bench.device.prepare(request))
            own = at if at >= HELD else 0
            expected = reference(request, "cloud", tuple(alone[:own]))
            assert (text, done.completion_tokens, done.degraded) == (text_of(expected), LENGTH, None), at
            assert done.handoff is not None and done.strategy == "draft_verify"
            assert (done.handoff.decided, done.handoff.at, done.handoff.saved_cloud_tokens) == ("cloud", own, own)
            assert done.handoff.score == 0.0 and done.stats["searches"] == 1.0


@pytest.mark.parametrize("drafts", [True, False])
async def test_an_answer_that_it_is_sure_of_leaves_no_byte_on_the_link(
    drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (bench, _):
        unsure_at(monkeypatch, NEVER)
        monkeypatch.setattr(bench.device._resources.worker, "told", not drafts, raising=False)
        for length in (LENGTH, HELD - 1):
            request = changed(ASKED, max_tokens=length)
            text, done = await collect(await bench.device.prepare(request))
            assert text == text_of(reference(request, "device"))
            assert done.handoff is not None and (done.handoff.decided, done.handoff.at) == ("device", None)
            assert (done.handoff.saved_cloud_tokens, done.handoff.risk) == (length, 0.0)
            assert not [name for name in done.stats if name.startswith(("sent_", "received_"))]
        [link] = bench.device.links()
        assert (dict(link.sent), link.asked) == ({}, 0) and done.degraded is None


async def test_nothing_is_told_or_sent_before_it_is_known_who_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(gated=("device",)) as (bench, _):
        unsure_at(monkeypatch, HELD + 2)
        told: list[TextDelta | GenerationResult] = []

        async def read() -> None:
            async for event in (await bench.device.prepare(ASKED)).run():
                told.append(event)  # type: ignore[arg-type]  # one of both

        reading = asyncio.create_task(read())
        worker = bench.device._resources.worker
        for forwards in range(HELD):
            while worker.load().steps < forwards:
                await asyncio.sleep(0.001)
            assert not told and not dict(bench.device.links()[0].sent) and not bench.cloud._peers.busy
            bench.engines["device"].gate.release()
        bench.engines["device"].release_gate()
        await reading
        assert isinstance(told[-1], GenerationResult) and dict(bench.device.links()[0].sent)
        expected = reference(ASKED, "cloud", tuple(reference(ASKED, "device")[: HELD + 2]))
        assert "".join(each.text for each in told[:-1] if isinstance(each, TextDelta)) == text_of(expected)


@pytest.mark.parametrize("at", [0, HELD, LENGTH - 1])
async def test_a_cloud_that_is_lost_as_it_is_to_take_over_is_done_without(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands_over = Preparation._hand_over

    async with pair() as (bench, tasks):

        async def lost(self: Preparation, *arguments: Any) -> ClientSession:
            await bench.unlink()
            return await hands_over(self, *arguments)

        monkeypatch.setattr(Preparation, "_hand_over", lost)
        unsure_at(monkeypatch, at)
        text, done = await collect(await bench.device.prepare(ASKED))
        assert (text, done.degraded) == (text_of(reference(ASKED, "device")), "cloud_lost")
        assert done.completion_tokens == LENGTH
        await bench.link(tasks)


async def test_stop_strings_and_logprobs_go_across_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (bench, _):
        at = HELD + 3
        unsure_at(monkeypatch, at)
        tokens = reference(ASKED, "cloud", tuple(reference(ASKED, "device")[:at]))
        stop = text_of(tokens)[at - 2 : at + 2]
        text, done = await collect(await bench.device.prepare(changed(ASKED, stop=(stop,))))
        assert (text, done.reason, done.stop) == (text_of(tokens)[: at - 2], "stop", stop)
        deltas = [event async for event in (await bench.device.prepare(changed(ASKED, top_logprobs=2))).run()]
        told = [each for event in deltas if isinstance(event, TextDelta) for each in event.logprobs]
        assert b"".join(bytes(chosen.bytes) for chosen, _ in told) == bytes(tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"handoff": None},
        {"handoff": "off"},
        {"on_loss": "fail"},
        {"constraint": Constraint("regex", "[a-d]{10}")},
        {"strategy": "draft_verify"},
        {"documents": 2},
    ],
    ids=str,
)
async def test_what_is_not_asked_for_or_may_not_be_tried_is_the_clouds_as_ever(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """documents: those of the cloud, which the device cannot read, may hold the answer."""
    async with pair() as (bench, _):
        unsure_at(monkeypatch, NEVER)
        _, done = await collect(await bench.device.prepare(changed(ASKED, **change)))
        assert done.handoff is None and done.strategy == "draft_verify" and done.stats["sent_open_bytes"] > 0


async def test_no_level_of_privacy_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (bench, _):
        unsure_at(monkeypatch, 0)
        text, done = await collect(await bench.device.prepare(changed(ASKED, privacy="local-only")))
        assert (text, done.handoff) == (text_of(reference(ASKED, "device")), None)
        assert dict(bench.device.links()[0].sent) == {}


async def test_what_came_of_answers_is_learnt_by_pair_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those in which any draft came in time."""
    monkeypatch.setattr(handoff, "LEAST_EXAMINED", 1)
    async with pair() as (bench, _):
        outcomes = bench.device._resources.outcomes = Outcomes(tmp_path)
        unsure_at(monkeypatch, 0)
        for seed in range(3):
            request = changed(ASKED, max_tokens=40, sampling=replace(ASKED.wish.sampling, seed=seed))
            await collect(await bench.device.prepare(request))
        [[pair_of, learnt]] = outcomes._learnt.items()
        assert 1 <= learnt.seen <= 3 and learnt.shift != 0.0
    outcomes.save()
    assert Outcomes(tmp_path).shift(pair_of) == outcomes.shift(pair_of) and outcomes.shift("another") == 0.0
    (tmp_path / "handoff.json").write_text('{"a": [1e999, 3], "b": 7}')
    assert Outcomes(tmp_path).shift("a") == 0.0
