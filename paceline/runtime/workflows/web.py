"""The web in workflows: searching it, reading pages, and a second look at what they said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from paceline.core.printable import one_line
from paceline.core.side import Side
from paceline.errors import LinkError, PacelineError, WebError
from paceline.rag.parsing.process import Around, ParserPool
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.store.readable import Readable
from paceline.rag.web import (
    DEFAULTS,
    MAX_SNIPPET,
    MAX_TITLE,
    PageFetcher,
    SearxngSearch,
    WebPage,
    WebResult,
    checked_query,
    read_page,
    shown,
)
from paceline.runtime.link.connection import Link
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import search_cloud
from paceline.runtime.workflows.agent_text import Searching
from paceline.runtime.workflows.lookup import CANDIDATES, Found, Lookup, Workflow, attempted, within
from paceline.settings_tables import TUNING
from paceline.workflow import agents
from paceline.workflow.agents import Evidence
from paceline.workflow.flows import SearchStages, TextStages, WorkflowStages
from paceline.workflow.graph import Launch, Outcome, Stage

log = logging.getLogger("paceline.workflow")

PARSE_S: Final = 30.0  # for reading a page's bytes, beside the seconds of fetching them
MAX_CHUNKS: Final = 64  # of a page: each is embedded


@dataclass(frozen=True, slots=True)
class WebLimits:
    """What one workflow may take of the web."""

    search_s: float = 10.0  # of one search
    results: int = TUNING.web_results  # of one search, whose pages are read
    page_s: float = DEFAULTS.total_s  # of fetching one
    pages: int = TUNING.web_pages  # of all searches


class WebAccess:
    """For one event loop. Parsers of pages start when they are needed, apart from those of uploads, and end when no
    page is being read."""

    def __init__(
        self, provider: SearxngSearch | None, limits: WebLimits | None = None, *, fetcher: PageFetcher | None = None
    ) -> None:
        """provider: None: the cloud's public documents stand for the web. fetcher: None: one that fetches from public
        addresses alone."""
        self.provider = provider
        self.limits = limits or WebLimits()
        self._fetcher = fetcher or PageFetcher()
        self._parsers = ParserPool()
        self._reading = 0

    async def read(self, url: str, store: Readable, around: Around = nullcontext) -> WebPage:
        """A page in passages of the size that the store's embedder reads. around: parsing, see `ParserPool.submit`.
        Raises PacelineError."""
        count = store.embedder.count
        reading = read_page(url, self._fetcher, self._parsers, count, most=MAX_CHUNKS, around=around)
        self._reading += 1
        try:
            return await within(self.limits.page_s + PARSE_S, reading)
        finally:
            self._reading -= 1
            if not self._reading:
                await asyncio.to_thread(self._parsers.rest)

    async def close(self) -> None:
        await asyncio.to_thread(self._parsers.close)


@dataclass(slots=True)
class NodeWeb:
    """What research searches and reads. link: to the cloud, for a device without another provider than the cloud's
    documents."""

    here: Side
    access: WebAccess
    store: Readable
    min_score: float  # passages of a page that are less similar to its query are not read
    link: Link | None = None
    parsing: Around = nullcontext  # of pages
    egress: Egress = field(default_factory=Egress)  # what was sent for it

    @property
    def side(self) -> Side:
        """Whose a result without a page is, and where pages are read."""
        return self.here if self.access.provider is not None else "cloud"

    @property
    def limits(self) -> WebLimits:
        return self.access.limits

    async def search(self, query: str) -> Sequence[WebResult]:
        """Raises PacelineError."""
        return await within(self.limits.search_s, self._search(checked_query(query)))

    async def read(self, url: str) -> WebPage:
        """Raises PacelineError."""
        self.egress.beside("page_url", sent=len(url.encode()))
        return await self.access.read(url, self.store, self.parsing)

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """The cosine of each text to the query; called on a host unit's thread. Raises PacelineError."""
        vectors = self.store.embedder.embed([query, *texts])
        return [float(score) for score in vectors[1:] @ vectors[0]]

    async def _search(self, query: str) -> Sequence[WebResult]:
        provider, results = self.access.provider, self.limits.results
        if provider is not None:
            self.egress.beside("web_query", sent=len(query.encode()))
            try:
                return await provider.search(query, results)
            except WebError as error:  # it names the operator's server, which is nobody else's business
                log.warning("a web search has failed: %s", error)
                raise PacelineError("the web search has failed; this side's log says why") from error
        if self.here == "cloud":
            found: Sequence[Passage] = await asyncio.to_thread(self.store.search, query, results) if query else ()
        elif self.link is None:
            raise PacelineError("the cloud, whose documents stand for the web, is not linked")
        else:
            try:
                found = await search_cloud(self.link, query, results, self.egress)
            except LinkError as error:
                raise PacelineError(f"the cloud's documents are not searched: {error}") from error
        titled = ((one_line(each.title or each.document, MAX_TITLE), passages_text(each)) for each in found)
        return [WebResult(title, "", one_line(text, MAX_SNIPPET)) for title, text in titled]


# Research of one workflow: queries of the plan are searched for, pages are read, and a second look may ask for more.
#
# The plan reads the user's own words alone, and the second look besides only what came from the web, so that nothing
# of a document is in what leaves. Each page is fetched, embedded, reranked and refined as soon as it is found. Whatever
# a page holds or does, the workflow goes on: a page that cannot be read leaves its snippet. Where no search finds
# anything, the second look is left out, and the workflow is the simpler one.


MAX_LOOKED_AT: Final = 6  # pieces of evidence: a small model's context has room for these, the question and an answer
CHUNKS: Final = 6  # of a page, as expected before it is there


class Research:
    """stages: of the whole workflow, begun."""

    def __init__(self, run: Workflow, web: NodeWeb, stages: WorkflowStages, question: str) -> None:
        assert stages.plan is not None and stages.look is not None, "the flow researches"
        self._run = run
        self._web = web
        self._stages = stages
        self._plan, self._look = stages.plan, stages.look
        self._evidence: list[Evidence] = []  # what was refined of pages, for the second look
        self._open = 1  # the plan, its searches, and pages that have come to something or still may
        self._urls: set[str] = set()  # of pages that are read
        search = partial(self._search, self._plan)
        planning = Searching(partial(agents.plan, question), search, "nothing to search for", ended=self.ended)
        looking = Searching(
            lambda: agents.look(question, tuple(self._evidence[:MAX_LOOKED_AT])),
            partial(self._search, self._look),
            "nothing to search for",
            before=lambda: planning.found,
        )
        run.write(self._plan, planning)
        run.write(self._look, looking)

    def _search(self, agent: TextStages, query: str) -> list[Stage]:
        """Stages that search the web for a query of an agent."""
        self._open += agent is self._plan
        search = self._stages.search_web(agent)
        search.run = partial(self._searched, agent is self._plan, query)
        return [search]

    async def _searched(self, planned: bool, query: str, launch: Launch) -> Outcome:
        results: Sequence[WebResult] = ()
        try:
            results = await self._web.search(query)
        except PacelineError as error:
            self._run.note(launch, str(error), failed=True)
        else:
            self._run.note(launch, f"{len(results)} results for {query!r}")
        room = self._web.limits.pages - len(self._urls)
        pages = [[each] for each in results if each.url and each.url not in self._urls][:room]
        self._urls |= {page[0].url for page in pages}
        without = [each for each in results if not each.url and each.snippet]
        added: list[Stage] = []
        for page in [*pages, *([without] if without else [])]:
            self._open += planned
            fetched = bool(page[0].url)
            chunks = CHUNKS if fetched else len(page)
            stages = self._stages.page(launch.stage, chunks, planned=planned, fetched=fetched)
            PageLookup(query, page, self._web, self._run, self, stages, planned=planned)
            added += stages.stages
        return Outcome(added=added, dropped=self.ended() if planned else ())

    def hear(self, evidence: Sequence[Evidence]) -> None:
        """What was refined of a page that the plan has asked for."""
        self._evidence += evidence

    def ended(self) -> Sequence[Stage]:
        """One of what is open has come to its end, or to nothing. Stages that are not wanted then."""
        self._open -= 1
        return () if self._open else self._look


class PageLookup:
    """The work of a page's stages, or of those of snippets without pages: its best passages are looked at."""

    def __init__(
        self,
        query: str,
        results: Sequence[WebResult],
        web: NodeWeb,
        run: Workflow,
        research: Research,
        stages: SearchStages,
        *,
        planned: bool,
    ) -> None:
        """results: one with its page, or several without. planned: by the plan, not by the second look."""
        self._query = query
        self._results = results
        self._web = web
        self._run = run
        self._ended = research.ended if planned else tuple
        self._stages = stages
        self._lookup = Lookup(query, run, stages, research.hear if planned else lambda _: None)
        self._passages: list[Passage] = []
        self._scores: dict[int, float] = {}  # by place in `_passages`
        stages.embed.run = self._embed
        if stages.fetch is not None:
            stages.fetch.run = self._fetch
        else:
            self._passages = [_passage(result, result.snippet) for result in results if result.snippet]

    async def _fetch(self, launch: Launch) -> Outcome:
        (result,) = self._results
        try:
            page = await self._web.read(result.url)
            titled = replace(result, title=one_line(page.title, MAX_TITLE) or result.title)
            self._passages = [_passage(titled, chunk.text, page.url, chunk.title) for chunk in page.passages]
            told, failed = f"{len(self._passages)} passages of {shown(page.url)}", False
        except PacelineError as error:
            told, failed = str(error), True
        except Exception as error:  # a stranger's page may lead to anything
            log.exception("a page could not be read")
            told, failed = f"{shown(result.url)} cannot be read ({type(error).__name__})", True
        if failed and result.snippet:
            self._passages = [_passage(result, result.snippet, result.url, result.title)]
        self._run.note(launch, told, failed=failed)
        if not self._passages:
            return self._nothing()
        self._stages.embed.resize(len(self._passages))
        return Outcome()

    async def _embed(self, launch: Launch) -> Outcome:
        part = self._passages[launch.first : launch.first + launch.count]
        texts = [passages_text(passage) for passage in part]
        scoring = self._run.registry.run(launch.unit, lambda: self._web.scores(self._query, texts) if texts else ())
        same = [self._web.min_score] * len(part)
        scores = await attempted(self._run, launch, scoring, same, "in the page's own order: ")
        self._scores |= dict(enumerate(scores, launch.first))
        if len(self._scores) < len(self._passages):
            return Outcome()
        about = [place for place in self._scores if self._scores[place] >= self._web.min_score]
        best = sorted(about, key=lambda place: (-self._scores[place], place))[:CANDIDATES]
        side: Side = self._web.side
        found = [
            Found(replace(self._passages[place], score=self._scores[place]), side, private=False, web=True)
            for place in best
        ]
        new = self._run.claims.take(found)
        self._run.note(launch, f"{len(new)} of {len(self._passages)} passages are about {self._query!r}")
        return self._lookup.take(new) if new else self._nothing()

    def _nothing(self) -> Outcome:
        """None of its stages is wanted."""
        own = [stage for stage in self._stages.stages if stage is not self._stages.fetch]
        return Outcome(dropped=[*own, *self._ended()])


def _passage(result: WebResult, text: str, url: str = "", title: str = "") -> Passage:
    """A passage of no store. title: before the text."""
    return Passage(result.title or "a page", -1, title, text, 0.0, collection="", url=url)
