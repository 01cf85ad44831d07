"""Passages that do not answer a question are not read, and where neither side has one that does, the answer says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from paceline.core.side import SIDES, Side, other
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.engine.families import NO_THINKING
from paceline.engine.reader.engine import load_pointer
from paceline.engine.reader.pointer import Pointer, SpanReading
from paceline.errors import ConfigError
from paceline.models import READER
from paceline.rag.records import Passage
from paceline.runtime import peers
from paceline.runtime.questions import GENERALLY, UNANSWERED, Judge, is_judged, parts_asked, unanswered_form
from paceline.runtime.service import GenerateRequest, GenerationResult, TextDelta
from paceline.runtime.sessions.base import PeerSession
from paceline.runtime.sessions.client import ClientSession
from paceline.strategies.base import RoutingContext, SideFacts, TimerFired, Wish
from paceline.strategies.joint import PeerWatch
from tests.requests import changed
from tests.runtime.test_node import Bench, collect
from tests.runtime.test_nothing_found import HELLO, LARGER_CLOUD, LARGER_DEVICE, Sizes, of, pair

pytestmark = pytest.mark.anyio


@dataclass
class Knows:
    """A reader that finds an answer where this stands."""

    words: str

    def read(self, question: str, document: str) -> SpanReading:  # noqa: ARG002
        return SpanReading(float(self.words in document), ())


def judge(words: str) -> Judge:
    return Judge(lambda: cast("Pointer", Knows(words)))


def asks(text: str, **fields: object) -> GenerateRequest:
    return changed(HELLO, messages=({"role": "user", "content": text},), **fields)


@asynccontextmanager
async def judged(
    folder: Path, words: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Bench, asyncio.TaskGroup]]:
    monkeypatch.setattr(ByteTokenizer, "one_document", False)
    async with pair(folder, sizes, monkeypatch) as (bench, tasks):
        for side in SIDES:
            of(bench, side)._resources.judge = judge(words)
        yield bench, tasks


BOTH_FIND = "When does the library of my landlord Velda open?"


@pytest.mark.parametrize("front", SIDES)
@pytest.mark.parametrize("sizes", [LARGER_CLOUD, LARGER_DEVICE])
async def test_an_answer_that_no_document_holds_says_so(
    front: Side, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judged(tmp_path, "seven o'clock", sizes, monkeypatch) as (bench, _):
        node = of(bench, front)
        text, done = await collect(await node.prepare(asks(BOTH_FIND, max_tokens=60)))
        assert text == UNANSWERED and done.reason == "stop" and done.citations == () and done.degraded is None
        assert done.strategy_reason.startswith("documents were found, and none answers the question")
        text, _ = await collect(await node.prepare(asks("When does the harbour library open?", max_tokens=60)))
        assert text.startswith(UNANSWERED + GENERALLY) and len(text) > len(UNANSWERED + GENERALLY)
        await bench.unlink()
        text, done = await collect(await node.prepare(asks(BOTH_FIND, max_tokens=60)))
        assert text == UNANSWERED and done.degraded in (None, "cloud_missing")


@pytest.mark.parametrize(("front", "knows"), [(front, side) for front in SIDES for side in SIDES])
async def test_a_side_whose_passages_do_not_answer_reads_none(
    front: Side, knows: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"cloud": "opens at eight", "device": "called Velda"}[knows]
    async with judged(tmp_path, words, Sizes(10, 10), monkeypatch) as (bench, _):
        _, done = await collect(await of(bench, front).prepare(asks(BOTH_FIND)))
        assert {citation.side for citation in done.citations} == {knows}


async def test_who_asks_for_more_than_an_answer_from_documents_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"role": "user", "content": BOTH_FIND}
    hello = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hello!"}
    async with judged(tmp_path, "seven o'clock", Sizes(10, 10), monkeypatch) as (bench, _):
        for fields in (
            {"options": {"unanswered": "write"}},
            {"options": {"search_every": 16}},
            {"strategy": "aggregate"},
            {"messages": ({"role": "system", "content": "It is seven o'clock."}, said)},
            {"messages": ({"role": "user", "content": f"{BOTH_FIND} I have forgotten it."},)},
            {"messages": (*hello, said)},
        ):
            text, done = await collect(await bench.device.prepare(changed(asks(BOTH_FIND, max_tokens=12), **fields)))
            assert not UNANSWERED.startswith(text), "of which twelve tokens would be the beginning"
            assert len(done.found) == 1, fields


def test_where_there_is_no_reader_every_passage_is_read() -> None:
    def missing() -> Pointer:
        raise ConfigError("not here")

    passage = Passage("a.md", 1, "a", "text", 0.5)
    assert Judge(missing).finds("What is it?", (passage,)) and not judge("word").finds("What is it?", (passage,))


def test_what_one_asks_of_oneself_nobody_knows_in_general() -> None:
    assert unanswered_form("What is my shoe size?").text == r"The documents do not say\."
    assert unanswered_form("Who is the president of the US?").text.endswith("+")
    assert unanswered_form("How tall is the tower?").text.endswith(" In general: (.|\\n)+")


def test_the_reader_judges() -> None:
    reader = Judge(lambda: load_pointer(READER))
    passage = Passage("a.md", 1, "Harbour", "The harbour library opens at eight. Ruud keeps the key.", 0.5)
    assert reader.finds("When does the harbour library open?", (passage,))
    assert not reader.finds("How tall is the lighthouse?", (passage,))
    assert reader.question(({"role": "user", "content": "When does it open?"},)) == "When does it open?"


async def test_a_peer_that_comes_back_reads_no_more_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judged(tmp_path, "seven o'clock", LARGER_DEVICE, monkeypatch) as (bench, tasks):
        request = asks("What is my landlord Velda called?", max_tokens=24, on_loss="pause")
        expected, _ = await collect(await bench.cloud.prepare(request))
        events = (await bench.cloud.prepare(request)).run()
        first = await anext(events)
        assert isinstance(first, TextDelta)
        await bench.unlink()
        await bench.link(tasks)
        rest = [event async for event in events]
        assert first.text + "".join(each.text for each in rest if isinstance(each, TextDelta)) == expected
        assert isinstance(rest[-1], GenerationResult) and rest[-1].citations == ()


@pytest.mark.parametrize("front", SIDES)
@pytest.mark.parametrize("how", ["refused", "lost", "slow", "lost and back"])
async def test_what_this_sides_documents_do_not_answer_is_said_without_the_peer(
    front: Side, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def searching(*_: object) -> None:
        await asyncio.Event().wait()

    async with judged(tmp_path, "seven o'clock", LARGER_CLOUD, monkeypatch) as (bench, tasks):
        build = peers.Peers._prompts
        monkeypatch.setattr(peers.Peers, "_prompts", searching)
        peer = of(bench, other(front))
        if how == "refused":
            monkeypatch.setattr(peer._peers, "_retrieve", refuse)
        request = asks(BOTH_FIND, max_tokens=60, on_loss="pause" if how == "lost and back" else "continue")
        session = await of(bench, front).prepare(request)
        assert isinstance(session, ClientSession)
        events = asyncio.create_task(collect(session))
        while not peer._peers.busy and not events.done():
            await asyncio.sleep(0)
        if how.startswith("lost"):
            await bench.unlink()
        if how == "lost and back":
            monkeypatch.setattr(peers.Peers, "_prompts", build)
            await bench.link(tasks)
        if how == "slow":
            monkeypatch.setattr(PeerWatch, "wake", lambda *_, **__: True)
            session.deliver(TimerFired(session._loop.time()))
        text, done = await events
        assert text == UNANSWERED and done.strategy == "lookup_tree"
        degraded = {"slow": f"{other(front)}_lost", "lost and back": None}
        assert done.degraded == degraded.get(how, f"{other(front)}_{how}")


async def refuse(session: PeerSession, *_: object) -> None:
    session.refuse("it is busy")


@pytest.mark.parametrize(
    "question",
    [
        "Why was the project cancelled?",
        "How can I cancel my subscription?",
        "What should I do if the alarm rings?",
        "What are the rules for guests?",
        "What is Heron?",
        "What is the lease about?",
        "What is the difference between the two plans?",
    ],
)
def test_what_is_explained_and_not_pointed_to_is_not_judged(question: str) -> None:
    assert not judge("word").question(({"role": "user", "content": question},))
    for pointed in ("What is Ruud's surname?", "What's the price?", "How many are there?", "Where can I park?"):
        assert judge("word").question(({"role": "user", "content": pointed},)) == pointed


def test_a_passage_that_the_reader_does_not_read_may_answer() -> None:
    german = Passage("a.md", 1, "Schwimmbad", "Das Schwimmbad öffnet um acht Uhr und ist am Montag geschlossen.", 0.5)
    long = Passage("b.md", 2, "b", "The pool is large. " * 2000, 0.5)
    for passage in (german, long):
        assert judge("word").finds("When does the pool open?", (passage,))


def test_damaged_weights_of_a_reader_are_no_reader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    passage = Passage("a.md", 1, "a", "text", 0.5)
    assert Judge(lambda: load_pointer(tmp_path)).finds("What is it?", (passage,))


async def test_a_model_that_thinks_though_it_is_not_to_says_so_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judged(tmp_path, "seven o'clock", Sizes(10, 10), monkeypatch) as (bench, _):
        tokenizer = bench.device._resources.tokenizer
        monkeypatch.setattr(tokenizer, "thinking", ("<think>", "</think>"))
        chat = tokenizer.chat
        monkeypatch.setattr(tokenizer, "chat", lambda *of, **more: [*chat(*of, **more), *tokenizer.encode("<think>\n")])
        request = asks(BOTH_FIND, max_tokens=400, template=NO_THINKING, thinking_tokens=12)
        deltas = [each async for each in (await bench.device.prepare(request)).run() if isinstance(each, TextDelta)]
        assert "".join(each.text for each in deltas if not each.thinking) == UNANSWERED


def test_small_models_are_judged_which_do_not_judge_themselves() -> None:
    small, reads = ByteTokenizer(), FakeEngine().info
    assert not is_judged(replace(reads, num_weights=10), small), "it reads one document, as readers do"
    small.one_document = False
    sizes = (0, 135_000_000, 2_000_000_000, 3_000_000_000)
    assert [is_judged(replace(reads, num_weights=size), small) for size in sizes] == [False, True, True, False]


@pytest.mark.parametrize("options", [{"joules_per_token": 1.0}, {"joules_per_step": 1.0}, {"search_every": 16}, {}])
def test_passages_are_not_judged_away_of_an_answer_that_cannot_say_so(options: dict[str, object]) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.one_document = False
    context = RoutingContext("device", Wish(), SideFacts(documents=1))
    (request,) = parts_asked(changed(asks(BOTH_FIND), options=options), context, tokenizer, None)
    assert request.wish.options["judged"] is not bool(options)
