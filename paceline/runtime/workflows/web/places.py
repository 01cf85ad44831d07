"""The web for one request: its searches and pages, what was sent for them, and which passages are about a query."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.side import Side
from paceline.errors import LinkError, PacelineError, WebError
from paceline.rag.parsing.pool import Around
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.rag.web.fetch import WebPage
from paceline.rag.web.search import MAX_SNIPPET, MAX_TITLE, StoreSearch, WebResult, checked_query, one_line
from paceline.runtime.link.connection import Link
from paceline.runtime.sessions.egress import Egress
from paceline.runtime.sessions.remote_search import RemoteSearch
from paceline.runtime.workflows.limits import within
from paceline.runtime.workflows.web.access import WebAccess, WebLimits

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
