"""A page's text in passages: fetched, parsed by the process that parses uploads, within its limits, and divided."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

from paceline.errors import DocumentError, ParserLost, WebError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS, Chunk, split_document
from paceline.rag.parsing.parsed import Parsed
from paceline.rag.parsing.pool import Around, ParserPool
from paceline.rag.parsing.process import memory_file
from paceline.rag.web.fetch import Page, PageFetcher

MAX_PASSAGES = 200  # of one page: some 30,000 tokens, more than any prompt takes
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class WebPage:
    """A page as read. Its text is a stranger's."""

    url: str  # after redirects
    title: str  # "" when it has none
    passages: tuple[Chunk, ...]
    is_cut: bool  # there was more text than MAX_PASSAGES hold


class PageReader:
    """Reads pages in any number at once; the fetcher and the parsers have their limits. For one event loop."""

    def __init__(
        self,
        fetcher: PageFetcher,
        parsers: ParserPool,
        count: Callable[[str], int],
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        overlap: int = OVERLAP_TOKENS,
        max_passages: int = MAX_PASSAGES,
        around: Around = nullcontext,
    ) -> None:
        """parsers: closed by their owner. count: tokens of a text, as of the embedder; called in other threads. around:
        parsing, see `ParserPool.submit`."""
        self._around = around
        self._fetcher = fetcher
        self._parsers = parsers
        self._count = count
        self._chunk_tokens = chunk_tokens
        self._overlap = overlap
        self._max_passages = max_passages

    async def read(self, url: str) -> WebPage:
        """Raises WebError for what cannot be fetched or read."""
        page = await self._fetcher.fetch(url)
        try:
            parsing = self._parsers.submit(page.name, lambda: memory_file(_declared(page)), self._around)
            parsed = await asyncio.wrap_future(parsing)
        except (DocumentError, ParserLost) as error:
            raise WebError(str(error)) from error
        passages = await asyncio.to_thread(self._passages, parsed)
        return WebPage(
            page.url, parsed.title, tuple(passages[: self._max_passages]), len(passages) > self._max_passages
        )

    def _passages(self, parsed: Parsed) -> list[Chunk]:
        """One more than are wanted, if there are."""
        chunks = split_document(parsed, self._count, chunk_tokens=self._chunk_tokens, overlap=self._overlap)
        return list(islice(chunks, self._max_passages + 1))


def _declared(page: Page) -> bytes:
    """The page's bytes; HTML with the server's character set written before the page's own declaration, as it precedes
    that in browsers too.
    """
    if not page.charset or not page.name.endswith(".html") or page.data.startswith(_MARKS):
        return page.data
    return f'<meta charset="{page.charset}">'.encode("ascii") + page.data
