"""The web in workflows: searching it, reading pages, and a second look at what they said."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from paceline.core.side import Side
from paceline.errors import LinkError, PacelineError, WebError
from paceline.rag.parsing.process import Around, ParserPool
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.rag.web.fetch import DEFAULTS, FetchLimits, PageFetcher, PageReader, WebPage, shown
from paceline.rag.web.search import MAX_SNIPPET, MAX_TITLE, StoreSearch, WebResult, WebSearch, checked_query, one_line
from paceline.runtime.link.connection import Link
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import RemoteSearch
from paceline.runtime.workflows.driver import Outcome, Work
from paceline.runtime.workflows.lookup import STAGE_S, Agents, Found, Lookup, Reading, refinements, within
from paceline.workflow.agents.reading import folded
from paceline.workflow.agents.records import AgentParser, Evidence, Prompt
from paceline.workflow.agents.roles import LOOK, PLAN, AnyAgent, LookInputs, PlanInputs, Queries
from paceline.workflow.builder import PUBLIC, WorkflowBuilder
from paceline.workflow.graph import Launch, SubStage, SubStageId

# What a node searches the web with, and how it reads pages, by the settings of its operator.


PARSE_S: Final = 30.0  # for reading a page's bytes, beside the seconds of fetching them
MAX_CHUNKS: Final = 64  # of a page: each is embedded


@dataclass(frozen=True, slots=True)
class WebLimits:
    """What one workflow may take of the web."""

    search_s: float = 10.0  # of one search
    results: int = 3  # of one search, whose pages are read
    page_s: float = DEFAULTS.total_s  # of fetching one
    page_bytes: int = DEFAULTS.body_bytes
    pages: int = 8  # of all searches


class WebAccess:
    """For one event loop. Parsers of pages start when they are needed, apart from those of uploads, and end when no
    page is being read."""

    def __init__(
        self, provider: WebSearch | None, limits: WebLimits | None = None, *, fetcher: PageFetcher | None = None
    ) -> None:
        """provider: None: the cloud's public documents stand for the web. fetcher: None: one that fetches from public
        addresses alone."""
        self.provider = provider
        self.limits = limits or WebLimits()
        fetching: FetchLimits = replace(DEFAULTS, total_s=self.limits.page_s, body_bytes=self.limits.page_bytes)
        self._fetcher = fetcher or PageFetcher(fetching)
        self._parsers = ParserPool()
        self._reading = 0

    async def read(self, url: str, store: DocumentStore, around: Around = nullcontext) -> WebPage:
        """A page in passages of the size that the store's embedder reads. around: parsing, see `ParserPool.submit`.
        Raises PacelineError."""
        count = store.embedder.count
        reader = PageReader(self._fetcher, self._parsers, count, max_passages=MAX_CHUNKS, around=around)
        async with self._resting():
            return await within(self.limits.page_s + PARSE_S, reader.read(url))

    async def close(self) -> None:
        await asyncio.to_thread(self._parsers.close)

    @asynccontextmanager
    async def _resting(self) -> AsyncIterator[None]:
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1
            if not self._reading:
                await asyncio.to_thread(self._parsers.rest)


# What the agents decide that search the web: queries of the plan, and of the second look at what was found.


Search = Callable[[str], list[tuple[SubStage, Work]]]  # sub-stages that search the web for a query
MAX_LOOKED_AT = 6  # pieces of evidence: a small model's context has room for these, the question and an answer


class Planning:
    """Searches for each query as soon as it is written. ended: called at the end; sub-stages that are not wanted."""

    def __init__(self, question: str, search: Search, ended: Callable[[], Sequence[SubStageId]]) -> None:
        self._inputs = PlanInputs(question)  # the user's own words: what is written leaves this side
        self._queries = _Queries(PLAN.parser(self._inputs), search, set())
        self._ended = ended

    private = False  # the user's own words alone
    is_wanted = True
    share = 1.0

    def messages(self) -> Prompt:
        return PLAN.messages(self._inputs)

    def restart(self) -> None:
        self._queries.restart(PLAN.parser(self._inputs))

    def read(self, text: str) -> Outcome:
        return self._queries.read(text)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        outcome, told = self._queries.end()
        return replace(outcome, dropped=self._ended()), fault or told

    @property
    def asked(self) -> set[str]:
        """Queries so far, folded."""
        return self._queries.asked


class SecondLook:
    """Reads what came from the web, and searches for what is missing in it. asked: queries of the plan."""

    is_wanted = True
    share = 1.0

    def __init__(self, question: str, search: Search, asked: Callable[[], set[str]]) -> None:
        self._question = question
        self._search = search
        self._asked = asked
        self._evidence: list[Evidence] = []
        self._queries: _Queries | None = None

    def hear(self, evidence: Sequence[Evidence]) -> None:
        """What was refined of a page."""
        self._evidence += evidence

    @property
    def private(self) -> bool:
        return any(each.private for each in self._evidence)

    def messages(self) -> Prompt:
        inputs = LookInputs(self._question, tuple(self._evidence[:MAX_LOOKED_AT]))
        if self._queries is None:
            self._queries = _Queries(LOOK.parser(inputs), self._search, self._asked())
        return LOOK.messages(inputs)

    def restart(self) -> None:
        inputs = LookInputs(self._question, tuple(self._evidence[:MAX_LOOKED_AT]))
        if self._queries is not None:
            self._queries.restart(LOOK.parser(inputs))

    def read(self, text: str) -> Outcome:
        return Outcome(finished=True) if self._queries is None else self._queries.read(text)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        outcome, told = (Outcome(), "") if self._queries is None else self._queries.end()
        return outcome, fault or told


class _Queries:
    """Searches for what a parser reads, each query once."""

    def __init__(self, parser: AgentParser[str, Queries], search: Search, asked: set[str]) -> None:
        self._parser = parser
        self._search = search
        self._found: list[str] = []
        self.asked = set(asked)

    def read(self, text: str) -> Outcome:
        return replace(self._begin(self._parser.feed(text)), finished=self._parser.done)

    def restart(self, parser: AgentParser[str, Queries]) -> None:
        """The text begins anew; what was searched for is not searched for again."""
        self._parser = parser

    def end(self) -> tuple[Outcome, str]:
        return self._begin(self._parser.end()), "; ".join(self._found) or "nothing to search for"

    def _begin(self, queries: Sequence[str]) -> Outcome:
        new = {folded(query): query for query in queries if folded(query) not in self.asked}
        self.asked |= set(new)
        self._found += new.values()
        return Outcome(added=[work for query in new.values() for work in self._search(query)])


# The web for one request: its searches and pages, what was sent for them, and which passages are about a query.


log = logging.getLogger("paceline.workflow")


class WebPlaces(Protocol):
    """What research searches and reads. `scores` is called on a host unit's thread."""

    @property
    def side(self) -> Side:
        """Whose a result without a page is, and where pages are read."""

    @property
    def limits(self) -> WebLimits: ...

    @property
    def min_score(self) -> float:
        """Passages of a page that are less similar to its query are not read."""

    def sent(self) -> Mapping[str, float]:
        """Bytes sent for it, by kind."""

    async def search(self, query: str) -> Sequence[WebResult]:
        """Raises PacelineError."""

    async def read(self, url: str) -> WebPage:
        """Raises PacelineError."""

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """The cosine of each text to the query. Raises PacelineError."""


@dataclass(slots=True)
class NodeWeb:
    """link: to the cloud, for a device without another provider than the cloud's documents."""

    here: Side
    access: WebAccess
    store: DocumentStore
    min_score: float
    link: Link | None = None
    parsing: Around = nullcontext  # of pages
    _egress: Egress = field(default_factory=Egress)
    _sent: Counter[str] = field(default_factory=Counter)
    _remote: RemoteSearch = field(default_factory=RemoteSearch)

    @property
    def side(self) -> Side:
        return self.here if self.access.provider is not None else "cloud"

    @property
    def limits(self) -> WebLimits:
        return self.access.limits

    def sent(self) -> Mapping[str, float]:
        return self._egress.stats() | {f"sent_{kind}_bytes": float(size) for kind, size in sorted(self._sent.items())}

    async def search(self, query: str) -> Sequence[WebResult]:
        return await within(self.limits.search_s, self._search(checked_query(query)))

    async def read(self, url: str) -> WebPage:
        self._sent["page_url"] += len(url.encode())
        return await self.access.read(url, self.store, self.parsing)

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        vectors = self.store.embedder.embed([query, *texts])
        return [float(score) for score in vectors[1:] @ vectors[0]]

    async def _search(self, query: str) -> Sequence[WebResult]:
        provider, results = self.access.provider, self.limits.results
        if provider is not None:
            self._sent["web_query"] += len(query.encode())
            try:
                return await provider.search(query, results)
            except WebError as error:  # it names the operator's server, which is nobody else's business
                log.warning("a web search has failed: %s", error)
                raise PacelineError("the web search has failed; this side's log says why") from error
        if self.here == "cloud":
            return await StoreSearch(self.store.search).search(query, results)
        if self.link is None:
            raise PacelineError("the cloud, whose documents stand for the web, is not linked")
        try:
            found = await self._remote.passages(self.link, query, results, self._egress)
        except LinkError as error:
            raise PacelineError(f"the cloud's documents are not searched: {error}") from error
        return [_result(passage) for passage in found]


def _result(passage: Passage) -> WebResult:
    return WebResult(one_line(passage.document, MAX_TITLE), "", one_line(passages_text(passage), MAX_SNIPPET))


# One page of the web, or the snippets of a search without pages: fetched, embedded, and its best passages looked at.
#
# Whatever a page holds or does, the workflow goes on: a page that cannot be read leaves its snippet.


CANDIDATES: Final = 8  # passages of a page that are reranked, as of a search


@dataclass(slots=True)
class PageLookup:
    """results: one with its page, or several without. lookup: of the stages after embedding. ended: called where the
    page comes to nothing; further sub-stages that are not wanted then."""

    query: str
    results: Sequence[WebResult]
    web: WebPlaces
    run: Reading
    nodes: dict[str, SubStage]
    lookup: Lookup
    ended: Callable[[], Sequence[SubStageId]]
    _passages: list[Passage] = field(default_factory=list)
    _scores: dict[int, float] = field(default_factory=dict)  # by place in `_passages`

    def works(self) -> list[tuple[SubStage, Work]]:
        own: dict[str, Work] = {"fetch": self._fetch, "embed page": self._embed}
        works = [(node, own[stage]) for stage, node in self.nodes.items() if stage in own]
        if "fetch" not in self.nodes:
            self._passages = [_passage(result, result.snippet) for result in self.results if result.snippet]
        return [*works, *self.lookup.works()]

    async def _fetch(self, launch: Launch) -> Outcome:
        (result,) = self.results
        try:
            page = await self.web.read(result.url)
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
        self.run.note("fetch", launch, told, failed=failed)
        if not self._passages:
            return self._nothing()
        return Outcome(resized=[(self.nodes["embed page"].id, len(self._passages))])

    async def _embed(self, launch: Launch) -> Outcome:
        part = self._passages[launch.first : launch.first + launch.count]
        texts = [passages_text(passage) for passage in part]
        try:
            scoring = self.run.registry.run(launch.unit, lambda: self.web.scores(self.query, texts) if texts else ())
            scores = await within(STAGE_S, scoring)
        except PacelineError as error:
            self.run.note("embed page", launch, f"in the page's own order: {error}", failed=True)
            scores = [self.web.min_score] * len(part)
        self._scores |= dict(enumerate(scores, launch.first))
        if len(self._scores) < len(self._passages):
            return Outcome()
        about = [place for place in self._scores if self._scores[place] >= self.web.min_score]
        best = sorted(about, key=lambda place: (-self._scores[place], place))[:CANDIDATES]
        side: Side = self.web.side
        found = [
            Found(replace(self._passages[place], score=self._scores[place]), side, private=False, web=True)
            for place in best
        ]
        new = self.run.claim(found)
        self.run.note("embed page", launch, f"{len(new)} of {len(self._passages)} passages are about {self.query!r}")
        return self.lookup.take(new, PUBLIC) if new else self._nothing()

    def _nothing(self) -> Outcome:
        """None of its stages is wanted."""
        own = [node.id for stage, node in self.nodes.items() if stage != "fetch"]
        return Outcome(dropped=[*own, *self.ended()])


def _passage(result: WebResult, text: str, url: str = "", title: str = "") -> Passage:
    """A passage of no store. title: before the text."""
    return Passage(result.title or "a page", -1, title, text, 0.0, collection="", url=url)


# Research of one workflow: queries of the plan are searched for, pages are read, and a second look may ask for more.
#
# The plan reads the user's own words alone, and the second look besides only what came from the web, so that nothing
# of a document is in what leaves. Each page is fetched, embedded, reranked and refined as soon as it is found. Where
# no search finds anything, the second look is left out, and the workflow is the simpler one.


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
