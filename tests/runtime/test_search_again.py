"""Documents searched for again in mid-answer: where each side searches and with what, and that the client sees one
answer, whatever happens at the end of a stretch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from lab.baselines.dragon import SHAPES, Shape
from paceline.core.sampling.sampler import Constraint
from paceline.core.side import SIDES, Side
from paceline.engine.fake import ByteTokenizer
from paceline.errors import PacelineError
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.asking import AskCounter
from paceline.runtime.service import GenerationResult
from paceline.runtime.sessions.output_text import AnswerText, Written
from paceline.runtime.sessions.prompts import query_with_text
from paceline.wire.messages import Targets
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes, open_gate, stores_of
from tests.wire import samples

pytestmark = pytest.mark.anyio

EVERY = 8
QUESTION = "Where is the key?"
AGAIN = changed(REQUEST, options={"search_every": EVERY}, max_tokens=32)
TEXTS = {
    "cloud": ("The key of the mill is in the harbour.", "A heron stands in the harbour every morning."),
    "device": ("My own key hangs in the hall.", "The hall was painted green last year."),
}


@dataclass
class Searched:
    """Queries of each side, in their order. What is found turns with their number."""

    queries: dict[Side, list[str]] = field(default_factory=lambda: {side: [] for side in SIDES})


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Mapping[Side, DocumentStore], Searched]]:
    searched = Searched()
    with stores_of(tmp_path, {side: dict(zip("ab", TEXTS[side], strict=True)) for side in SIDES}) as opened:
        for side, store in opened.items():
            search = store.search

            def turning(
                query: str, *rest: object, side: Side = side, search: object = search, **named: object
            ) -> list[Passage]:
                searched.queries[side].append(query)
                found: list[Passage] = search(query, 2, *rest[1:], **{**named, "min_score": -1.0})  # type: ignore[operator]
                found.sort(key=lambda passage: passage.chunk_id)
                return found[len(searched.queries[side]) % 2 :][:1]

            monkeypatch.setattr(store, "search", turning)
        yield opened, searched


@pytest.mark.parametrize(("front", "aggregator"), [("device", "mixture"), ("cloud", "coin")])
async def test_without_documents_a_search_changes_no_token(front: Side, aggregator: str) -> None:
    async with nodes() as (bench, _):
        node = getattr(bench, front)
        once = await collect(await node.prepare(changed(AGAIN, options={"aggregator": aggregator})))
        again = await collect(
            await node.prepare(changed(AGAIN, options={"aggregator": aggregator, "search_every": EVERY}))
        )
    assert again[0] == once[0]
    assert again[1].completion_tokens == once[1].completion_tokens > 2 * EVERY
    assert (again[1].reason, again[1].degraded, again[1].strategy) == (once[1].reason, None, "aggregate")
    assert again[1].stats["searches"] == -(-again[1].completion_tokens // EVERY)


async def test_both_sides_search_with_the_text_so_far_and_the_answer_reads_what_they_find(
    stores: tuple[Mapping[Side, DocumentStore], Searched],
) -> None:
    opened, searched = stores
    async with nodes(stores=opened) as (bench, _):
        text, done = await collect(await bench.device.prepare(AGAIN))
        assert text
        ends = range(0, done.completion_tokens, EVERY)
        tokens = ByteTokenizer().encode(text)
        assert len(tokens) == done.completion_tokens, "the fake model writes text of one byte a token"
        expected = [query_with_text(AGAIN.prompt.messages, tokens[:end], ByteTokenizer()) for end in ends]
        assert searched.queries["device"] == expected
        assert searched.queries["cloud"] == expected
        assert {each.passage for each in done.found} == set(TEXTS["device"])
        cited = {each.passage for each in done.citations if each.side == "cloud"}
        assert cited <= set(TEXTS["cloud"])


async def test_a_form_holds_over_stretches() -> None:
    form = Constraint("json_schema", '{"type":"string","minLength":12,"maxLength":14}')
    request = changed(AGAIN, constraint=form, max_tokens=40)
    async with nodes() as (bench, _):
        once, done = await collect(await bench.device.prepare(changed(request, options={})))
        again, _ = await collect(await bench.device.prepare(request))
    assert again == once and done.reason == "stop" and again.startswith('"') and again.endswith('"')


async def test_logprobs_are_of_every_token() -> None:
    async with nodes() as (bench, _):
        generation = await bench.device.prepare(changed(AGAIN, top_logprobs=2))
        events = [event async for event in generation.run()]
    done = events[-1]
    assert isinstance(done, GenerationResult)
    given = sum(len(event.logprobs) for event in events if not isinstance(event, GenerationResult))
    assert given == done.completion_tokens > EVERY


async def test_a_client_that_leaves_in_a_later_stretch_frees_both_sides() -> None:
    async with nodes() as (bench, _):
        generation = await bench.device.prepare(AGAIN)
        events = generation.run()
        said = ""
        while len(said) <= EVERY:
            event = await anext(events)
            assert not isinstance(event, GenerationResult)
            said += event.text
        await events.aclose()  # type: ignore[attr-defined]  # every one is a generator
        assert not bench.device.load().answers  # `nodes` finds sequences that were not released


@pytest.mark.parametrize("on_loss", ["continue", "fail"])
async def test_an_answer_whose_peer_is_lost_goes_on_over_its_searches_or_fails(on_loss: str) -> None:
    async with nodes() as (bench, _):
        events = (await bench.device.prepare(changed(AGAIN, on_loss=on_loss))).run()
        await anext(events)
        await bench.unlink()
        if on_loss == "fail":
            with pytest.raises(PacelineError, match="not to go on alone"):
                _ = [event async for event in events]
            return
        *_, done = [event async for event in events]
    assert isinstance(done, GenerationResult) and done.degraded == "cloud_lost"
    assert done.completion_tokens == AGAIN.output.max_tokens or done.reason == "stop"


async def test_an_answer_written_alone_is_searched_for_once_and_says_so() -> None:
    async with nodes(linked=False) as (bench, _):
        _, done = await collect(await bench.device.prepare(changed(AGAIN, strategy="auto")))
    assert "searched for once (only 'aggregate'" in done.strategy_reason and "searches" not in done.stats


async def test_an_answer_without_documents_is_one_stretch_and_a_short_one_counts_its_search() -> None:
    async with nodes() as (bench, _):
        _, without = await collect(await bench.device.prepare(changed(AGAIN, documents=0)))
        _, short = await collect(await bench.device.prepare(changed(AGAIN, stop=("a", "e", "i", " "))))
    assert "no documents are searched for" in without.strategy_reason and "searches" not in without.stats
    assert short.completion_tokens <= EVERY and short.stats["searches"] == 1


def test_the_query_is_the_question_and_the_end_of_the_text() -> None:
    tokenizer = ByteTokenizer()
    messages = ({"role": "user", "content": QUESTION},)
    query = query_with_text(messages, tokenizer.encode("é" * 2000), tokenizer)
    assert query.startswith(f"{QUESTION}\n") and len(query) < 700
    assert "é" in query_with_text(messages, tokenizer.encode("aé")[:3], tokenizer)
    cut = query_with_text(messages, tokenizer.encode("aé")[:2], tokenizer)
    assert cut == f"{QUESTION}\na", "half a character is left out"


async def test_a_peer_that_refuses_in_mid_answer_is_not_asked_again_and_its_words_are_told() -> None:
    async with nodes() as (bench, _):
        bench.device._asks._counter = AskCounter(2, 10_000)
        refused = []
        refuse = bench.device._asks.refuse
        bench.device._asks.refuse = lambda opening, why: (refused.append(why), refuse(opening, why))  # type: ignore[method-assign, assign, func-returns-value]
        _, done = await collect(await bench.cloud.prepare(AGAIN))
    assert len(refused) == 1 and refused[0] in done.strategy_reason
    assert done.degraded == "device_refused" and done.stats["searches"] > 3


def test_a_peer_that_is_too_slow_is_left_out_of_ever_more_stretches() -> None:
    written = Written(AnswerText(ByteTokenizer(), ()))
    asked = []
    for _ in range(14):
        asked.append(written.is_asked())
        if asked[-1]:
            written.pass_over()
    assert "".join(".x"[each] for each in asked) == "x.x...x.......", "1, 3, 7"
    written.refusal = "no"
    assert not any(written.is_asked() for _ in range(40))


async def test_a_device_joins_a_stretch_while_the_one_before_is_still_open_there() -> None:
    """As where it waits for a mask, and has not read that the cloud has left."""
    gate = open_gate()
    opening = msgspec.structs.replace(samples.opening(1), targets=[], asker="")
    ask = gate.admit(opening)
    ask.observe(Targets(1, 0, 0, [5, 6, 7], b""))
    later = gate.admit(msgspec.structs.replace(opening, session=3, targets=[5, 6, 7]), "the question\nand more")
    assert later.part.question.text == "the question\nand more", "the log has what is searched for"
    other = gate.admit(msgspec.structs.replace(opening, session=5, targets=[5, 9]))
    assert other.part is not later.part, "what was lost on the way is known to one side alone: a question of its own"
    await gate.close()


@pytest.mark.parametrize("front", SIDES)
async def test_drafts_change_no_token_of_such_an_answer(
    front: Side, stores: tuple[Mapping[Side, DocumentStore], Searched]
) -> None:
    opened, searched = stores
    texts = []
    async with nodes(stores=opened) as (bench, _):
        shapes: tuple[Shape, ...] = ("none", "chain", "tree")
        for shape in shapes:
            for queries in searched.queries.values():
                queries.clear()
            options = {"search_every": EVERY, "drafting": SHAPES[shape], "aggregator": "mixture"}
            request = changed(AGAIN, options=options, max_tokens=20)
            texts.append((await collect(await getattr(bench, front).prepare(request)))[0])
    assert len(set(texts)) == 1


async def test_a_stop_string_may_begin_in_one_stretch_and_end_in_the_next() -> None:
    async with nodes() as (bench, _):
        whole, _ = await collect(await bench.device.prepare(AGAIN))
        stop = whole[EVERY - 2 : EVERY + 2]
        text, done = await collect(await bench.device.prepare(changed(AGAIN, stop=(stop,))))
    assert text == whole[: whole.index(stop)] and (done.reason, done.stop) == ("stop", stop)
