"""What a node searches the web with, and how it reads pages, by the settings of its operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

from paceline.rag.parsing.pool import Around, ParserPool
from paceline.rag.store.documents import DocumentStore
from paceline.rag.web.fetch import DEFAULTS, FetchLimits, PageFetcher, PageReader, WebPage
from paceline.rag.web.search import WebSearch
from paceline.runtime.workflows.limits import within

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
