"""Web search: the protocol of its providers, and the limits of what goes in and comes out.

Knows nothing of pages. A query leaves this machine: whoever calls decides whether it may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.core.printable import printable
from paceline.errors import WebError
from paceline.rag.prompt import MAX_QUERY

MAX_RESULTS = 50  # of one search
MAX_TITLE = 200  # characters
MAX_SNIPPET = 2000  # characters


@dataclass(frozen=True, slots=True)
class WebResult:
    """One result. Title and snippet are text of strangers, on one line."""

    title: str
    url: str  # http or https, not checked further; "" where the snippet is all there is
    snippet: str


class WebSearch(Protocol):
    @property
    def name(self) -> str:
        """The provider, for reports."""

    async def search(self, query: str, k: int) -> list[WebResult]:
        """At most k results, best first, k being at most MAX_RESULTS. Raises WebError when the search failed."""


def checked_query(query: str) -> str:
    """The query on one line; "" for an empty one. Raises WebError for one of more than MAX_QUERY characters."""
    words = " ".join(printable(query).split())
    if len(words) > MAX_QUERY:
        raise WebError(f"A web search takes at most {MAX_QUERY} characters, and this one has {len(words)}.")
    return words


def one_line(text: str, limit: int) -> str:
    """Text of a stranger on one line of at most `limit` characters."""
    return " ".join(printable(text[: 4 * limit]).split())[:limit]
