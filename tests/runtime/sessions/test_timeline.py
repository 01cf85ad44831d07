"""The timeline of an answer, and the bytes it sends: numbers are the report's, whoever writes; and it stays short."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core.side import SIDES, Side, other
from paceline.runtime.link import connection
from paceline.runtime.link.connection import SentToday
from paceline.runtime.service import GenerationResult, Moment, TextDelta
from paceline.runtime.sessions.driver import MAX_MOMENTS, Egress, Timeline
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import encode
from paceline.wire.messages import CloseSession, Targets
from tests.requests import changed
from tests.runtime.test_node import HARBOUR, LANDLORD, REQUEST, Passages, collect, nodes
from tests.runtime.test_node_faults import ENDLESS
from tests.runtime.test_nothing_found import FOUND, HELLO, LARGER_CLOUD, pair

pytestmark = pytest.mark.anyio

TOLD = changed(REQUEST, timeline=True)
SECRETS = re.compile(r"key|harbour|landlord|\.md")  # words of the questions and documents


def sums(moments: Iterable[Moment]) -> Counter[str]:
    """By kind, by kind and side, and by kind and what it is of."""
    found: Counter[str] = Counter()
    for each in moments:
        for name in {each.kind, f"{each.kind} {each.side}", f"{each.kind} {each.of}"}:
            found[name] += each.number  # type: ignore[assignment]  # whole numbers, and ms
    return found


def check(done: GenerationResult) -> Counter[str]:
    """All numbers are those of the report."""
    found, stats = sums(done.timeline), done.stats
    assert found["tokens"] == done.completion_tokens
    for kind in ("forwards", "handovers"):
        assert found[kind] == stats.get(kind, 0)
    for kind in ("drafted", "accepted"):
        by_side = [stats[f"{kind}_{side}"] for side in SIDES if f"{kind}_{side}" in stats]
        assert found[kind] == (sum(by_side) if by_side else stats.get(kind, 0))
    for way in ("sent", "received"):
        told = {name: size for name, size in stats.items() if name.startswith(f"{way}_")}
        assert {f"{way}_{name.split()[1]}_bytes": size for name, size in found.items() if is_of(name, way)} == told
    assert [each.ms for each in done.timeline] == sorted(each.ms for each in done.timeline)
    assert not any(SECRETS.search(each.of) for each in done.timeline)
    return found


def is_of(name: str, way: str) -> bool:
    return name.startswith(f"{way} ") and name.split()[1] not in SIDES


@pytest.mark.parametrize("front", SIDES)
async def test_the_numbers_of_every_strategy_are_those_of_its_report(front: Side) -> None:
    drafted = 0
    async with nodes() as (bench, _):
        for strategy in sorted(STRATEGIES):
            _, done = await collect(await bench.of(front).prepare(changed(TOLD, strategy=strategy)))
            found = check(done)
            assert done.strategy == strategy and found[f"strategy {strategy}"] == 1 == found[f"prefill {front}"] / (
                done.prompt_tokens
            )
            joint = STRATEGIES[strategy].needs_peer
            assert (found["round_trips"] > 0) == (found["received"] > 0) == joint
            drafted += found["drafted"]
        assert drafted > 0
        _, done = await collect(await bench.of(front).prepare(REQUEST))
        assert done.timeline == (), "only where it is asked for"


@pytest.mark.parametrize(("front", "asked"), [*product(SIDES, ("hello", *SIDES))])
async def test_a_switch_of_the_strategy_is_told_with_the_figures_of_who_wrote(
    front: Side, asked: str, tmp_path: Path
) -> None:
    question = FOUND.get(asked, "hello")  # type: ignore[call-overload]
    async with pair(tmp_path, LARGER_CLOUD) as (bench, _):
        request = changed(HELLO, messages=({"role": "user", "content": question},), timeline=True)
        _, done = await collect(await bench.of(front).prepare(request))
        found = check(done)
        switched = asked == front or (front, asked) == ("cloud", "hello")
        assert found[f"strategy {done.strategy}"] == 1 and found["strategy"] == 1 + switched
        assert found[f"search {front}"] == (asked == front), "passages"
        assert found[f"search {other(front)}"] == (asked == other(front))


async def test_a_peer_that_is_lost_is_done_without_and_joins_again_which_is_told() -> None:
    async with nodes(gated=("cloud",)) as (bench, tasks):
        events = (await bench.device.prepare(TOLD)).run()
        bench.engines["cloud"].gate.release()
        assert isinstance(await anext(events), TextDelta)
        await bench.unlink()
        assert isinstance(await anext(events), TextDelta), "alone, without the gated cloud"
        bench.engines["cloud"].release_gate()
        await bench.link(tasks)
        *_, done = [event async for event in events]
    assert isinstance(done, GenerationResult) and done.degraded == "cloud_lost"
    assert done.completion_tokens == TOLD.output.max_tokens or done.reason == "stop"
    found = check(done)
    assert found["lost cloud"] == found["back cloud"] == 1


def test_a_long_answer_has_a_short_timeline_whose_numbers_add_up() -> None:
    now = 0.0
    timeline = Timeline("device", lambda: now)
    beside = timeline.beside("device")
    for at in range(5000):
        now = at / 100
        timeline.note("tokens", side=SIDES[at % 2])
        beside.note("forwards", 3.0, since=now - 0.002)
    moments = timeline.moments(beside)
    assert len(moments) <= MAX_MOMENTS and sums(moments)["tokens"] == 5000 and sums(moments)["forwards"] == 15_000
    assert sum(each.took_ms for each in moments) == pytest.approx(10_000, rel=0.01)
    assert max(each.ms for each in moments) > 49_000 and beside.moments() == ()


# ---- bytes that an answer sends, by kind of message -----------------------------------------------------------------
def test_only_sent_messages_are_counted_by_kind() -> None:
    egress = Egress()
    assert not egress
    for message in (Targets(1, 0, 0, [5], b""), Targets(1, 0, 1, [6], b""), CloseSession(1, "stop")):
        egress.sent(message, len(encode(message)))
    egress.sent(CloseSession(1, "stop"), 0)
    assert list(egress.stats()) == ["sent_close_bytes", "sent_targets_bytes"]
    assert egress.stats()["sent_close_bytes"] == len(encode(CloseSession(1, "stop")))
    assert "targets" in str(egress)


@pytest.mark.parametrize(("privacy", "more"), [("document-private", {"drafts"}), ("open", {"drafts", "weight"})])
async def test_each_side_reports_the_bytes_it_has_sent(
    privacy: str, more: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes() as (bench, _):
        bench.have(Passages(LANDLORD), Passages(HARBOUR))
        request = changed(REQUEST, max_tokens=12, sampling=ENDLESS, options={"aggregator": "mixture"}, privacy=privacy)
        with caplog.at_level(logging.INFO, "paceline.session"):
            _, done = await collect(await bench.device.prepare(request))
            while sum("sent to the other side" in message for message in caplog.messages) < 2:
                await asyncio.sleep(0)  # the cloud receives the CloseSession
    sent = {stat.split("_")[1] for stat in done.stats if stat.startswith("sent_")}
    assert {"open", "targets", "close"} <= sent and ({"drafts", "weight"} & sent) == more
    cloud = next(message for message in caplog.messages if "found" in message)
    assert "drafts" in cloud and "weight" in cloud


def test_what_left_today_is_counted_by_hour_until_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.strptime("2026-03-01 22:10", "%Y-%m-%d %H:%M")
    monkeypatch.setattr(connection, "time", SimpleNamespace(strftime=lambda form: time.strftime(form, now)))
    today = SentToday()
    today.add("open", 5)
    today.add("open", 2)
    now = time.strptime("2026-03-01 23:00", "%Y-%m-%d %H:%M")
    today.add("drafts", 3)
    assert today.by_hour() == {"22": {"open": 7}, "23": {"drafts": 3}}
    now = time.strptime("2026-03-02 00:00", "%Y-%m-%d %H:%M")
    assert today.by_hour() == {}
