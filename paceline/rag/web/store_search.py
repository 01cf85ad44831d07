"""Web search in a public document store, such as a cloud's: its passages as results, each a snippet without a page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.web.search import MAX_RESULTS, MAX_SNIPPET, MAX_TITLE, WebResult, checked_query, one_line


class StoreSearch:
    """Whoever makes it sees to it that the documents are public: results count as what the web says."""

    name = "store"

    def __init__(self, search: Callable[[str, int], Sequence[Passage]]) -> None:
        """search(query, k): such as `DocumentStore.search`. Called in another thread."""
        self._search = search

    async def search(self, query: str, k: int) -> list[WebResult]:
        """As `WebSearch.search`. Errors are those of the store."""
        words = checked_query(query)
        if not words or k < 1:
            return []
        passages = await asyncio.to_thread(self._search, words, min(k, MAX_RESULTS))
        return [
            WebResult(one_line(each.title or each.document, MAX_TITLE), "", one_line(passages_text(each), MAX_SNIPPET))
            for each in passages
        ]
