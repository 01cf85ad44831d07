"""The privacy level `answer-private`: the device writes alone, with passages that the cloud finds for a query."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from paceline.core.fair import Shares
from paceline.errors import LinkError, RequestError
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.link.connection import Link
from paceline.runtime.peers import MAX_SEARCHES
from paceline.runtime.service import GenerationResult
from paceline.runtime.sessions import remote as search_module
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import MAX_BYTES, search_cloud, to_wire
from paceline.wire.messages import CloseSession, OpenSession, RetrievedPassages
from tests.requests import changed
from tests.runtime.test_node import HARBOUR, LANDLORD, REQUEST, Bench, Passages, collect, nodes

pytestmark = pytest.mark.anyio

PRIVATE = changed(REQUEST, strategy="auto", privacy="answer-private")


class Broken(Passages):
    def search(self, query: str, k: int, *_selection: object, min_score: float = 0.0) -> list[Passage]:  # noqa: ARG002
        raise OSError("the disk is gone")


def cloud_end(bench: Bench) -> Link:
    assert bench.links is not None
    return bench.links[1]


def opened(bench: Bench) -> list[OpenSession]:
    """Record the openings the cloud receives from now on."""
    openings: list[OpenSession] = []
    link = cloud_end(bench)
    take_part = link.on_open
    assert take_part is not None

    def record(opening: OpenSession) -> None:
        openings.append(opening)
        take_part(opening)

    link.on_open = record
    return openings


async def test_only_the_query_is_sent_and_the_answer_equals_that_of_one_side_with_all_documents() -> None:
    async with nodes() as (bench, _):
        cloud = Passages(HARBOUR)
        bench.have(Passages(LANDLORD), cloud)
        openings = opened(bench)
        text, done = await collect(await bench.device.prepare(PRIVATE))
        (opening,) = openings
        question = PRIVATE.prompt.messages[-1]["content"]
        assert (opening.messages, opening.query, opening.targets) == ([], question, [])
        assert opening.constraint is None and cloud.queries == [question]
        assert (done.strategy, done.degraded) == ("lookup_tree", None)
        assert [(of.side, of.document, of.passage) for of in done.found] == [
            ("device", "notes.md", LANDLORD.text),
            ("cloud", "harbour.md", HARBOUR.text),
        ]
        assert done.citations == done.found
        assert {stat for stat in done.stats if stat.startswith("sent_")} - {"sent_close_bytes"} == {"sent_open_bytes"}
        assert len(question) < done.stats["sent_open_bytes"] < len(question) + 120

        bench.have(Passages(LANDLORD, HARBOUR), Passages())
        alone, _ = await collect(await bench.device.prepare(changed(PRIVATE, privacy="local-only")))
        assert text == alone and len(openings) == 1


async def test_the_clouds_passages_are_used_where_the_device_has_no_documents() -> None:
    async with nodes() as (bench, _):
        bench.cloud._resources.store = cast(DocumentStore, Passages(HARBOUR))
        _, done = await collect(await bench.device.prepare(changed(PRIVATE, strategy="autoregressive")))
        assert [of.side for of in done.found] == ["cloud"] and done.strategy == "autoregressive"


@pytest.mark.parametrize("fault", ["refuses", "is silent", "fails", "is lost"])
async def test_a_failed_search_marks_the_answer_as_degraded(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes() as (bench, _):
        bench.device._peers._expects_peer = lambda: True  # as an agent with a cloud does
        bench.have(Passages(LANDLORD), Broken() if fault == "fails" else Passages(HARBOUR))
        link = cloud_end(bench)
        match fault:
            case "refuses":
                link.on_open = None
            case "is silent":
                monkeypatch.setattr(search_module, "TIMEOUT_S", 0.01)
                link.on_open = lambda opening: link.attach(opening.session, lambda _: None)
            case "is lost":
                link.on_open = lambda _: bench.pipes_in_use[1].abort() if bench.pipes_in_use is not None else None
        session = await bench.device.prepare(PRIVATE)
        _, done = await collect(session)
        assert done.degraded == "cloud_missing" and [of.side for of in done.found] == ["device"]
        with pytest.raises(RequestError) as refused:
            await bench.device.prepare(changed(PRIVATE, on_loss="fail"))
        assert refused.value.status == 503


async def test_neither_side_sends_or_accepts_more_passages_than_requested() -> None:
    many = [replace(HARBOUR, chunk_id=i, text=f"The harbour has {i} boats.") for i in range(9)]
    async with nodes() as (bench, _):
        bench.have(Passages(LANDLORD), Passages())
        link = cloud_end(bench)

        def flood(opening: OpenSession) -> None:
            link.attach(opening.session, lambda _: None)
            link.send(RetrievedPassages(opening.session, to_wire(many)))
            link.send(CloseSession(opening.session, "stop"))

        link.on_open = flood
        _, done = await collect(await bench.device.prepare(changed(PRIVATE, documents=2)))
        assert [of.side for of in done.found] == ["device", "cloud", "cloud"]
    wide = [replace(HARBOUR, text="\u0e01" * 16_000)] * 40
    assert 0 < len(to_wire(wide)) < 40 and sum(len(of.text.encode()) for of in to_wire(wide)) <= MAX_BYTES


async def test_searches_beyond_the_limit_are_refused() -> None:
    async with nodes() as (bench, _):
        bench.have(Passages(LANDLORD), Passages(HARBOUR))
        bench.cloud._peers._searches = Shares(0)
        _, done = await collect(await bench.device.prepare(PRIVATE))
        assert done.degraded == "cloud_missing"
        bench.cloud._peers._searches = Shares(MAX_SEARCHES)
        _, done = await collect(await bench.device.prepare(changed(PRIVATE, documents=1)))
        assert done.degraded is None


async def test_a_device_cannot_be_searched() -> None:
    async with nodes() as (bench, _):
        store = Passages(LANDLORD)
        bench.have(store, Passages())
        with pytest.raises(LinkError, match="does not know 'search'"):
            await search_cloud(cloud_end(bench), "who is my landlord?", 3, Egress())
        assert not store.queries


async def test_an_answer_that_ends_leaves_no_session_open() -> None:
    async with nodes() as (bench, _):
        bench.have(Passages(LANDLORD), Passages(HARBOUR))
        for _ in range(3):
            session = await bench.device.prepare(PRIVATE)
            async for event in session.run():
                assert not isinstance(event, GenerationResult) or event.degraded is None
        assert bench.links is not None
        assert not any(len(link._machine.sessions) for link in bench.links)


async def test_a_request_without_documents_opens_no_session() -> None:
    async with nodes() as (bench, _):
        openings = opened(bench)
        await collect(await bench.device.prepare(changed(PRIVATE, documents=0)))
        assert not openings


async def test_no_query_is_sent_for_a_refused_request() -> None:
    async with nodes(max_positions=64) as (bench, _):
        openings = opened(bench)
        long = changed(PRIVATE, messages=({"role": "user", "content": "Where is the harbour? " * 40},))
        with pytest.raises(RequestError, match="maximum context length"):
            await bench.device.prepare(long)
        assert not openings
