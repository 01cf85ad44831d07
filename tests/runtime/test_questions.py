"""Passages that do not answer are not read, an answer that no document holds says so, and parts are asked in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.core.side import SIDES, Side, other
from paceline.engine.base import LoadedModel, ModelInfo
from paceline.engine.fake import EOS, ByteTokenizer, FakeEngine
from paceline.engine.families import NO_THINKING
from paceline.engine.reader.engine import load_pointer
from paceline.engine.reader.pointer import Pointer, SpanReading
from paceline.engine.reader.question import separate_questions
from paceline.errors import ConfigError
from paceline.models import READER
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime import peers
from paceline.runtime.admission import Parts
from paceline.runtime.node import Node
from paceline.runtime.questions import BETWEEN, GENERALLY, UNANSWERED, Judge, is_judged, parts_asked, unanswered_form
from paceline.runtime.service import GenerateRequest, GenerationResult, TextDelta
from paceline.runtime.sessions.base import PeerSession
from paceline.runtime.sessions.client import ClientSession
from paceline.strategies.base import RoutingContext, SideFacts, TimerFired, Wish
from paceline.strategies.joint import PeerWatch
from tests.requests import a_request, changed
from tests.runtime.test_node import Bench, collect
from tests.runtime.test_nothing_found import EQUAL, FOUND, HELLO, LARGER_CLOUD, LARGER_DEVICE, Sizes, pair

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


@pytest.fixture(autouse=True)
def reads_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "one_document", False)


@asynccontextmanager
async def judged(folder: Path, words: str, sizes: Sizes) -> AsyncIterator[tuple[Bench, asyncio.TaskGroup]]:
    async with pair(folder, sizes) as (bench, tasks):
        for side in SIDES:
            bench.of(side)._resources.judge = judge(words)
        yield bench, tasks


BOTH_FIND = "When does the library of my landlord Velda open?"


@pytest.mark.parametrize("front", SIDES)
@pytest.mark.parametrize("sizes", [LARGER_CLOUD, LARGER_DEVICE])
async def test_an_answer_that_no_document_holds_says_so(front: Side, sizes: Sizes, tmp_path: Path) -> None:
    async with judged(tmp_path, "seven o'clock", sizes) as (bench, _):
        node = bench.of(front)
        text, done = await collect(await node.prepare(asks(BOTH_FIND, max_tokens=60)))
        assert text == UNANSWERED and done.reason == "stop" and done.citations == () and done.degraded is None
        assert done.strategy_reason.startswith("documents were found, and none answers the question")
        text, _ = await collect(await node.prepare(asks("When does the harbour library open?", max_tokens=60)))
        assert text.startswith(UNANSWERED + GENERALLY) and len(text) > len(UNANSWERED + GENERALLY)
        await bench.unlink()
        text, done = await collect(await node.prepare(asks(BOTH_FIND, max_tokens=60)))
        assert text == UNANSWERED and done.degraded in (None, "cloud_missing")


@pytest.mark.parametrize(("front", "knows"), [(front, side) for front in SIDES for side in SIDES])
async def test_a_side_whose_passages_do_not_answer_reads_none(front: Side, knows: Side, tmp_path: Path) -> None:
    words = {"cloud": "opens at eight", "device": "called Velda"}[knows]
    async with judged(tmp_path, words, EQUAL) as (bench, _):
        _, done = await collect(await bench.of(front).prepare(asks(BOTH_FIND)))
        assert {citation.side for citation in done.citations} == {knows}


async def test_who_asks_for_more_than_an_answer_from_documents_is_not_judged(tmp_path: Path) -> None:
    said = {"role": "user", "content": BOTH_FIND}
    hello = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hello!"}
    async with judged(tmp_path, "seven o'clock", EQUAL) as (bench, _):
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


async def test_a_peer_that_comes_back_reads_no_more_than_before(tmp_path: Path) -> None:
    async with judged(tmp_path, "seven o'clock", LARGER_DEVICE) as (bench, tasks):
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

    async with judged(tmp_path, "seven o'clock", LARGER_CLOUD) as (bench, tasks):
        build = peers.Peers._prompts
        monkeypatch.setattr(peers.Peers, "_prompts", searching)
        peer = bench.of(other(front))
        if how == "refused":
            monkeypatch.setattr(peer._peers, "_retrieve", refuse)
        request = asks(BOTH_FIND, max_tokens=60, on_loss="pause" if how == "lost and back" else "continue")
        session = await bench.of(front).prepare(request)
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
    async with judged(tmp_path, "seven o'clock", EQUAL) as (bench, _):
        tokenizer = bench.device._resources.tokenizer
        monkeypatch.setattr(tokenizer, "thinking", ("<think>", "</think>"))
        chat = tokenizer.chat
        monkeypatch.setattr(tokenizer, "chat", lambda *of, **more: [*chat(*of, **more), *tokenizer.encode("<think>\n")])
        request = asks(BOTH_FIND, max_tokens=400, template=NO_THINKING, thinking_tokens=12)
        deltas = [each async for each in (await bench.device.prepare(request)).run() if isinstance(each, TextDelta)]
        assert "".join(each.text for each in deltas if not each.thinking) == UNANSWERED


def test_small_models_are_judged_which_do_not_judge_themselves() -> None:
    small, reads = ByteTokenizer(), FakeEngine().info
    small.one_document = True
    assert not is_judged(replace(reads, num_weights=10), small), "it reads one document, as readers do"
    small.one_document = False
    sizes = (0, 135_000_000, 2_000_000_000, 3_000_000_000)
    assert [is_judged(replace(reads, num_weights=size), small) for size in sizes] == [False, True, True, False]


@pytest.mark.parametrize("options", [{"joules_per_token": 1.0}, {"joules_per_step": 1.0}, {"search_every": 16}, {}])
def test_passages_are_not_judged_away_of_an_answer_that_cannot_say_so(options: dict[str, object]) -> None:
    context = RoutingContext("device", Wish(), SideFacts(documents=1))
    (request,) = parts_asked(changed(asks(BOTH_FIND), options=options), context, ByteTokenizer(), None)
    assert request.wish.options["judged"] is not bool(options)


# ---- an answer that says that no document answers cites none --------------------------------------------------------
ASKED = a_request(
    ({"role": "user", "content": "Where is the red boat of the old mill?"},),
    SamplingParams(temperature=0.0, logit_bias={EOS: -100.0}),
    16,
    strategy="autoregressive",
)


class Refusing(FakeEngine):
    """Has words for a refusal."""

    words: str = ""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, refusals=(self.words,))


async def answer(folder: Path, words: str) -> tuple[str, GenerationResult]:
    engine, tokenizer = Refusing(1), ByteTokenizer()
    engine.words, tokenizer.one_document = words, True  # as of the models that have such words
    with DocumentStore.open(folder, HashEmbedder()) as store:
        store.add_text("boats.md", "The red boat lies behind the old mill.", zone="cloud")
        store.add_text("mills.md", "The old mill has a red roof and a boat.", zone="cloud")
        async with Node("cloud", LoadedModel(engine, tokenizer), store) as node:
            return await collect(await node.prepare(ASKED))


async def test_an_answer_that_is_a_refusal_cites_nothing_and_any_other_what_decided_it(tmp_path: Path) -> None:
    text, done = await answer(tmp_path, "")
    assert done.citations and len(text.strip()) > 4
    same, refused = await answer(tmp_path, text.strip().removesuffix("."))
    assert same == text and refused.citations == () and refused.found == done.found
    assert (await answer(tmp_path, text.strip()[:-2]))[1].citations == done.citations, "it says more than that"


# ---- a question in parts: each is answered in turn, as if it were asked alone ---------------------------------------
QUESTION = "When does the harbour library open, and what is my landlord called?"
ENDS = (32,)  # a blank, which a fake answer soon has


def asking(question: str, index: int = 0, **parts: object) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.0, seed=7).nth(index)
    messages = ({"role": "user", "content": question},)
    asked = {"messages": messages, "sampling": sampling, "stop_token_ids": ENDS, "max_tokens": 200}
    return changed(HELLO, **asked | parts)


@pytest.mark.parametrize("front", SIDES)
async def test_each_part_is_answered_as_if_it_were_asked_alone(
    front: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, LARGER_CLOUD) as (bench, _):
        node = bench.of(front)
        alone = [
            await collect(await node.prepare(asking(FOUND[side], index)))
            for index, side in enumerate(("cloud", "device"))
        ]
        text, done = await collect(await node.prepare(asking(QUESTION)))
        assert text == BETWEEN.join(text for text, _ in alone)
        assert done.completion_tokens == sum(part.completion_tokens for _, part in alone)
        assert {citation.side for citation in done.citations} == {
            citation.side for _, part in alone for citation in part.citations
        }
        assert (done.reason, done.degraded) == ("stop", None)
        assert done.strategy_reason.startswith("each part of the question is answered in turn: ")

        few = alone[0][1].completion_tokens + 1
        text, done = await collect(await node.prepare(asking(QUESTION, max_tokens=few)))
        assert done.completion_tokens == few and done.reason == "length", "all parts have one limit"
        assert text.startswith(alone[0][0] + BETWEEN)
        assert not node.load().answers, "every place has been given back"

        async with aclosing((await node.prepare(asking(QUESTION))).run()) as events:
            assert any([event == TextDelta(BETWEEN, 0) and node.load().answers == 1 async for event in events])

        endless = asking(QUESTION, sampling=SamplingParams(logit_bias={EOS: -100.0}), stop_token_ids=(), max_tokens=24)
        _, done = await collect(await node.prepare(changed(endless, options={"search_every": 8})))
        assert done.stats["searches"] == 3, "stretches of a part count"

        monkeypatch.setattr(node._preparation._reading, "max_tokens_default", few)
        _, done = await collect(await node.prepare(asking(QUESTION, max_tokens=None)))
        assert (done.completion_tokens, done.reason) == (few, "length"), "so do they share the setting's"


async def test_only_a_free_answer_of_documents_has_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path, LARGER_CLOUD) as (bench, _):
        for differs in (
            {"strategy": "aggregate"},
            {"documents": 0},
            {"constraint": Constraint("json_object")},
            {"top_logprobs": 0},
            {"on_loss": "pause"},
            {"stop": ("\n\n",)},  # the line end between two parts may be of it
        ):
            generation = await bench.device.prepare(asking(QUESTION, **differs))
            assert not isinstance(generation, Parts), differs
            await generation.aclose()
        for template in ({}, {"enable_thinking": False}):  # as Anthropic's clients ask where they do not name it
            generation = await bench.device.prepare(asking(QUESTION, template=template))
            assert isinstance(generation, Parts)
            await generation.aclose()
        monkeypatch.setattr(ByteTokenizer, "one_document", True)  # as the demonstration's, which does so itself
        whole = await bench.device.prepare(asking(QUESTION))
        assert not isinstance(whole, Parts)
        await whole.aclose()


@pytest.mark.parametrize(
    "text",
    [
        "What is a lease?",
        "What is a lease, and when does it end?",  # refers to the first part
        "When was the Harbour Library built and who designed the building?",  # may
        "What is the capital of Norway and who is the king?",
        "Who wrote Dune and when was the book published?",
        "What is the rent and what else do I pay?",
        "How do vaccines work and how are they made?",
        "I rent a flat. What is the rent, and when is it due?",  # what stands before belongs to both
        "Write a poem about the sea and what is in it",
        "What does this print?\nprint(1) and what is 2?",
        "What is " + "very " * 80 + "old, and where is the harbour?",
        "Who is Ann? Where is Bob? What is the rent? When is it due?",  # more than are answered
        "Who is Ann? Where is Bob? What is the rent? What is a lease?",
        "Who wrote 'What is love, and when does love end'?",
        'What does "who is Ann? Where is Bob?" mean?',
        "Why is `a and what is b` wrong?",
        "Where did the man and the woman meet?",  # no part without other words
        "What time and where is the meeting?",
        "What are my son and my daughter called?",
        "What is the name of my landlord and where does he live?",
    ],
)
def test_what_cannot_be_asked_part_by_part_is_asked_whole(text: str) -> None:
    assert separate_questions(text) == ()


def test_parts_that_can_be_asked_alone() -> None:
    assert separate_questions(QUESTION) == tuple(FOUND.values())
    assert len(separate_questions("Who is Ann? Where is my key? What is the rent of the flat?")) == 3
