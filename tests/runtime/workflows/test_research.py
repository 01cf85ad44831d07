"""Research with a scripted web and scripted agents: what is searched, in which order, and what goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.core.side import Side
from paceline.errors import PacelineError, RequestError, WebError
from paceline.rag.chunk import Chunk
from paceline.rag.web import WebPage, WebResult
from paceline.runtime.service import GenerateRequest, GenerationResult
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.units import UnitRegistry
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.run import WorkflowRun
from paceline.runtime.workflows.web import WebLimits
from tests.requests import changed
from tests.runtime.test_node import collect
from tests.runtime.workflows.test_run import ASKED, KEY, Models, ScriptedPlaces

pytestmark = pytest.mark.anyio

RESEARCH = changed(ASKED, workflow="research")
HALL = WebResult("Halls", "http://halls.test/", "A snippet of the hall.")
BROOM = WebResult("Brooms", "http://brooms.test/", "A snippet of brooms.")


@dataclass
class ScriptedWeb:
    """Results by a word of the query, passages by URL. faults: URLs and queries that fail; held: those that wait."""

    results: dict[str, list[WebResult]] = field(default_factory=lambda: {"key": [HALL]})
    pages: dict[str, list[str]] = field(default_factory=lambda: {HALL.url: ["The key of the hall is red."]})
    faults: frozenset[str] = frozenset()
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    broken: bool = False  # its embedder
    side: Side = "device"
    limits: WebLimits = field(default_factory=WebLimits)
    min_score: float = 0.25
    queries: list[str] = field(default_factory=list)
    read_urls: list[str] = field(default_factory=list)

    egress: Egress = field(default_factory=Egress)

    async def search(self, query: str) -> Sequence[WebResult]:
        self.queries.append(query)
        self.egress.beside("web_query", sent=len(query))
        await self._pass(query)
        return next((found for word, found in self.results.items() if word in query), [])

    async def read(self, url: str) -> WebPage:
        self.read_urls.append(url)
        await self._pass(url)
        texts = self.pages[url]
        return WebPage(url, "", tuple(Chunk(0, len(text), text, "") for text in texts))

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:  # noqa: ARG002
        if self.broken:
            raise PacelineError("the embedder is broken")
        return [0.1 if "unrelated" in text else 0.5 for text in texts]

    async def _pass(self, name: str) -> None:
        if name in self.held:
            await self.held[name].wait()
        if name in self.faults:
            raise WebError(f"{name} is down")


async def researched(
    web: ScriptedWeb | None,
    models: Models,
    request: GenerateRequest = RESEARCH,
    places: ScriptedPlaces | None = None,
) -> GenerationResult:
    driver = WorkflowDriver(UnitRegistry("device", web=True))
    places = places or ScriptedPlaces({"key": KEY})
    async with asyncio.timeout(30):
        _, done = await collect(WorkflowRun(request, places, driver, models.admit, web=web))
    await driver.close()
    assert all(text.closed.is_set() for text in models.texts)
    return done


def read(models: Models) -> list[tuple[str, str]]:
    """Texts of the answer's own passages, with their URLs."""
    (asked,) = models.of("answer")
    return sorted((passage.text, passage.url) for passage in asked.sources.passages or ())


async def test_pages_of_a_planned_search_are_read_beside_the_documents() -> None:
    web, models = ScriptedWeb(), Models()
    done = await researched(web, models)
    assert web.queries == ["key in the hall"]
    assert read(models) == [("The key is under the broom.", ""), ("The key of the hall is red.", HALL.url)]
    assert done.degraded is None
    assert {step.stage for step in done.steps} >= {"plan", "search web", "fetch", "embed page", "look"}
    assert done.stats["sent_web_query_bytes"] == len("key in the hall")
    assert all(step.unit and step.seconds >= 0.0 for step in done.steps)


async def test_a_second_look_asks_for_what_is_missing_and_is_read_too() -> None:
    web = ScriptedWeb({"broom": [BROOM], "key": [HALL]}, {HALL.url: ["A red hall."], BROOM.url: ["A broom is red."]})
    models = Models(plan=("key in the hall\n",), look=("red broom of the hall\n",))
    await researched(web, models)
    assert web.queries == ["key in the hall", "red broom of the hall"]
    (looked,) = models.of("look")
    messages = looked.prompt.messages
    assert "A red hall." in messages[-1]["content"] and "under the broom" not in str(messages)
    assert [url for _, url in read(models)] == [BROOM.url, HALL.url, ""]


async def test_the_second_look_repeats_no_search() -> None:
    web, models = ScriptedWeb(), Models(look=("Key in the hall\n",))
    await researched(web, models)
    assert len(web.queries) == 1


async def test_a_page_is_read_while_another_search_is_under_way() -> None:
    """The page of the first query is refined before the second search has an answer."""
    late, refined = "late key search", asyncio.Event()
    web = ScriptedWeb(held={late: refined})
    models = Models(plan=("key in the hall\n", f"{late}\n"))
    admit = models.admit

    async def listening(request: GenerateRequest) -> Any:
        if "The key of the hall" in request.prompt.messages[-1]["content"]:
            refined.set()  # otherwise the late search never ends
        return await admit(request)

    models.admit = listening  # type: ignore[method-assign]
    done = await researched(web, models)
    assert refined.is_set() and done.degraded is None


async def test_a_plan_without_a_search_needs_no_second_look() -> None:
    web, models = ScriptedWeb(), Models(plan=("NONE",))
    done = await researched(web, models)
    assert not web.queries and not models.of("look")
    assert done.degraded is None


async def test_an_embedder_that_fails_leaves_the_pages_own_order() -> None:
    web, models = ScriptedWeb(broken=True), Models()
    done = await researched(web, models)
    assert ("The key of the hall is red.", HALL.url) in read(models)
    assert "left out: embed page" in done.strategy_reason


@pytest.mark.parametrize("texts", [[], ["unrelated text"]])
async def test_a_page_without_anything_about_the_query_is_not_read(texts: list[str]) -> None:
    web, models = ScriptedWeb(pages={HALL.url: texts}), Models()
    done = await researched(web, models)
    assert [url for _, url in read(models)] == [""]
    assert done.degraded is None and not models.of("look")


async def test_results_without_pages_are_read_as_they_are() -> None:
    found = [WebResult("Hall", "", "The key is red."), WebResult("Barn", "", "unrelated")]
    web, models = ScriptedWeb({"key": found}, side="cloud"), Models()
    await researched(web, models)
    (asked,) = models.of("answer")
    assert [(passage.document, passage.text) for passage in asked.sources.other_passages] == [
        ("Hall", "The key is red.")
    ]
    assert not web.read_urls


async def test_no_more_pages_are_read_than_there_is_room_for() -> None:
    many = [WebResult(f"Page {n}", f"http://p{n}.test/", "") for n in range(5)]
    web = ScriptedWeb({"key": many}, {each.url: ["The key."] for each in many}, limits=WebLimits(pages=2))
    await researched(web, Models(look=("another key search\n",)))
    assert web.read_urls == [many[0].url, many[1].url] and len(web.queries) == 2


async def test_a_lost_search_of_the_other_side_is_an_error_where_the_request_says_so() -> None:
    places = ScriptedPlaces({"key": KEY}, faults=frozenset({"search_far"}))
    with pytest.raises(RequestError, match="not want an answer without it"):
        await researched(ScriptedWeb(), Models(), changed(RESEARCH, on_loss="fail"), places)
