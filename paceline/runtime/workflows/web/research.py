"""Research of one workflow: queries of the plan are searched for, pages are read, and a second look may ask for more.

The plan reads the user's own words alone, and the second look besides only what came from the web, so that nothing of a
document is in what leaves. Each page is fetched, embedded, reranked and refined as soon as it is found. Where no search
finds anything, the second look is left out, and the workflow is the simpler one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from paceline.errors import PacelineError
from paceline.rag.web.search import WebResult
from paceline.runtime.workflows.driver import Outcome, Work
from paceline.runtime.workflows.lookup import Agents, Lookup, Reading, refinements
from paceline.runtime.workflows.web.decisions import Planning, SecondLook
from paceline.runtime.workflows.web.page import PageLookup
from paceline.runtime.workflows.web.places import WebPlaces
from paceline.workflow.agents.look import LOOK
from paceline.workflow.agents.plan import PLAN
from paceline.workflow.agents.registry import AnyAgent
from paceline.workflow.builder import WorkflowBuilder
from paceline.workflow.events import Launch
from paceline.workflow.graph import SubStage, SubStageId

CHUNKS: Final = 6  # of a page, as expected before it is there
KEPT: Final = 2  # passages of a page that are read


class Researching(Reading, Agents, Protocol):
    """The workflow that research is part of."""


class Research:
    """nodes: of the whole workflow, as the builder began it."""

    def __init__(
        self, run: Researching, web: WebPlaces, builder: WorkflowBuilder, question: str, nodes: Sequence[SubStage]
    ) -> None:
        self._run = run
        self._web = web
        self._builder = builder
        self._nodes = {node.stage: node for node in nodes if node.stage.startswith(("plan.", "look."))}
        self._planning = Planning(question, partial(self._search, of_plan=True), self._ended)
        self._look = SecondLook(question, partial(self._search, of_plan=False), lambda: self._planning.asked)
        self._open = 1  # the plan, its searches, and pages that have come to something or still may
        self._urls: set[str] = set()  # of pages that are read

    def works(self) -> list[tuple[SubStage, Work]]:
        """Of the agents' sub-stages, which are there from the beginning."""
        works: dict[str, Work] = {}
        readers: tuple[tuple[AnyAgent, Planning | SecondLook], ...] = ((PLAN, self._planning), (LOOK, self._look))
        for kind, reader in readers:
            agent = self._run.agent(kind, reader.messages, reader)
            works |= {f"{kind.stage}.prefill": agent.prefill, f"{kind.stage}.decode": agent.decode}
        return [(node, works[stage]) for stage, node in self._nodes.items()]

    def _search(self, query: str, *, of_plan: bool) -> list[tuple[SubStage, Work]]:
        """Sub-stages that search the web for a query."""
        decider = self._builder.plan if of_plan else self._builder.look
        assert decider is not None, "the builder has begun research"
        self._open += of_plan
        search = self._builder.web_search(decider)

        async def work(launch: Launch) -> Outcome:
            return await self._searched(query, search, launch, of_plan=of_plan)

        return [(search, work)]

    async def _searched(self, query: str, search: SubStage, launch: Launch, *, of_plan: bool) -> Outcome:
        results: Sequence[WebResult] = ()
        try:
            results = await self._web.search(query)
        except PacelineError as error:
            self._run.note("search web", launch, str(error), failed=True)
        else:
            self._run.note("search web", launch, f"{len(results)} results for {query!r}")
        added = self._pages(query, search, results, of_plan=of_plan)
        return Outcome(added=added, dropped=self._ended() if of_plan else ())

    def _pages(
        self, query: str, search: SubStage, results: Sequence[WebResult], *, of_plan: bool
    ) -> list[tuple[SubStage, Work]]:
        """Sub-stages that read what a search has found, as far as there is room for it."""
        room = self._web.limits.pages - len(self._urls)
        pages = [[each] for each in results if each.url and each.url not in self._urls][:room]
        self._urls |= {page[0].url for page in pages}
        without = [each for each in results if not each.url and each.snippet]
        works: list[tuple[SubStage, Work]] = []
        for page in [*pages, *([without] if without else [])]:
            self._open += of_plan
            works += self._page(query, search, page, of_plan=of_plan)
        return works

    def _page(
        self, query: str, search: SubStage, results: Sequence[WebResult], *, of_plan: bool
    ) -> list[tuple[SubStage, Work]]:
        """Sub-stages that read one page, or the snippets of results without pages."""
        fetched = bool(results[0].url)
        chunks = CHUNKS if fetched else len(results)
        nodes = {node.stage: node for node in self._builder.web_page(search, chunks, fetched=fetched)}
        after = {stage: node for stage, node in nodes.items() if stage not in ("fetch", "embed page")}
        heard = self._look.hear if of_plan else lambda _: None
        refined = refinements(self._run, query, after, heard)
        lookup = Lookup(query, self._run, after, KEPT, refined)
        ended: Callable[[], Sequence[SubStageId]] = self._ended if of_plan else lambda: ()
        return PageLookup(query, results, self._web, self._run, nodes, lookup, ended).works()

    def _ended(self) -> Sequence[SubStageId]:
        """One of what is open has come to its end, or to nothing. Sub-stages that are not wanted then."""
        self._open -= 1
        return () if self._open else [node.id for stage, node in self._nodes.items() if stage.startswith("look.")]
