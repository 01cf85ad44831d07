"""Web search: the protocol of its providers, and the limits of what goes in and comes out.

Knows nothing of pages. A query leaves this machine: whoever calls decides whether it may.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx
import msgspec

from paceline import __version__
from paceline.core.printable import printable
from paceline.errors import ConfigError, WebError
from paceline.rag.prompt import MAX_QUERY, passages_text
from paceline.rag.records import Passage
from paceline.rag.web.fetch import ACCEPTED_ENCODINGS, MAX_URL, read_body

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


# Web search in a public document store, such as a cloud's: its passages as results, each a snippet without a page.


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


# Web search by a SearXNG server, or one that answers `GET /search?format=json` as it does.
#
# The operator configures its URL, so it may be on this machine or in a private network. Its answer is believed to be
# text and URLs, nothing more. https://docs.searxng.org/dev/search_api


MAX_ANSWER_BYTES = 2 * 2**20
_ADVICE = {
    403: "it does not allow JSON: add `json` to `search.formats` in its settings.yml, or a key is missing",
    429: "it has had too many requests: allow this client in its limiter",
}


class _Answer(msgspec.Struct):
    results: list[object]
    unresponsive_engines: object = None


class _Result(msgspec.Struct):
    url: str
    title: str | None = None
    content: str | None = None


class SearxngSearch:
    """One page of results a search. May be used from several event loops."""

    name = "searxng"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        language: str = "",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """url: without `/search`; may have a user name and password. timeout_s: of a whole search. language: such as
        "en"; "" for the server's own. headers: further ones, such as of a proxy before it. tls: whose certificates are
        believed; None: the usual authorities. Raises ConfigError.
        """
        try:
            base = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            base = httpx.URL()
        if base.scheme not in ("http", "https") or not base.host:
            raise ConfigError("The URL of SearXNG must be like http://127.0.0.1:8080.")
        self._url = base.copy_with(path=f"{base.path.rstrip('/')}/search", query=None, fragment=None)
        self._shown = f"SearXNG at {base.scheme}://{base.netloc.decode('ascii')}"
        self._timeout_s = timeout_s
        self._fields = {"format": "json"} | ({"language": language} if language else {})
        self._headers = {
            "User-Agent": f"paceline/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": ACCEPTED_ENCODINGS,
            **(headers or {}),
        }
        self._tls = tls or httpx.create_ssl_context()

    async def search(self, query: str, k: int) -> list[WebResult]:
        """As `WebSearch.search`. Results that are malformed or of other schemes are left out."""
        # To SearXNG, a word that begins with ! is a command, by which a query would choose engines or leave the server.
        words = " ".join(stripped for word in checked_query(query).split() if (stripped := word.lstrip("!")))
        if not words or k < 1:
            return []
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._get(words)
        except TimeoutError:
            raise WebError(f"{self._shown} takes more than {self._timeout_s:g} s.") from None
        except httpx.HTTPError as error:
            raise WebError(f"{self._shown} cannot be reached ({type(error).__name__}).") from error
        try:
            # Python's JSON lets pass halves of surrogate pairs, which scraped titles contain, and msgspec's does not.
            answer = msgspec.convert(json.loads(body.decode("utf-8", "replace")), _Answer)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise WebError(f"{self._shown} does not answer with SearXNG's JSON.") from None
        found = _results(answer.results, min(k, MAX_RESULTS))
        if not found and (silent := _engines(answer.unresponsive_engines)):
            raise WebError(f"{self._shown} found nothing: no answer from {silent}.")
        return found

    async def _get(self, words: str) -> bytes:
        # Not as a redirect leads, nor through a proxy of the environment: the operator has named this server.
        client = httpx.AsyncClient(
            verify=self._tls, trust_env=False, follow_redirects=False, timeout=self._timeout_s, headers=self._headers
        )
        async with client, client.stream("GET", self._url, params={"q": words, **self._fields}) as response:
            if response.status_code != 200:
                status = response.status_code
                raise WebError(f"{self._shown} answers with status {status}: {_ADVICE.get(status, 'is it SearXNG?')}.")
            return await read_body(response, f"The answer of {self._shown}", MAX_ANSWER_BYTES)


def _results(answers: list[object], k: int) -> list[WebResult]:
    """The first k that are well-formed, each URL once."""
    found: dict[str, WebResult] = {}
    for answer in answers:
        if len(found) == k:
            break
        try:
            result = msgspec.convert(answer, _Result)
        except msgspec.MsgspecError:
            continue
        url = result.url.strip()
        if url.lower().startswith(("http://", "https://")) and len(url) <= MAX_URL and url.isprintable():
            title, snippet = one_line(result.title or "", MAX_TITLE), one_line(result.content or "", MAX_SNIPPET)
            found.setdefault(url, WebResult(title or url[:MAX_TITLE], url, snippet))
    return list(found.values())


def _engines(answer: object) -> str:
    """The names of engines that did not answer; "" where the answer does not tell."""
    try:
        names = [name for name, *_ in msgspec.convert(answer, list[list[str]])]
    except (msgspec.MsgspecError, ValueError):
        return ""
    return one_line(", ".join(names), MAX_TITLE)
