"""Web search, and the limits of what goes in and comes out.

A query leaves this machine: whoever calls decides whether it may.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass

import httpx
import msgspec

from paceline import __version__
from paceline.core.printable import one_line, printable
from paceline.errors import ConfigError, WebError
from paceline.rag.prompt import MAX_QUERY
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


def checked_query(query: str) -> str:
    """The query on one line; "" for an empty one. Raises WebError for one of more than MAX_QUERY characters."""
    words = " ".join(printable(query).split())
    if len(words) > MAX_QUERY:
        raise WebError(f"A web search takes at most {MAX_QUERY} characters, and this one has {len(words)}.")
    return words


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

    def __init__(self, url: str, *, timeout_s: float = 10.0, tls: ssl.SSLContext | None = None) -> None:
        """url: without `/search`; may have a user name and password. timeout_s: of a whole search. tls: whose
        certificates are believed; None: the usual authorities. Raises ConfigError.
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
        self._headers = {
            "User-Agent": f"paceline/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": ACCEPTED_ENCODINGS,
        }
        self._tls = tls or httpx.create_ssl_context()

    async def search(self, query: str, k: int) -> list[WebResult]:
        """At most k results, best first, k being at most MAX_RESULTS. Those that are malformed or of other schemes are
        left out. Raises WebError when the search failed."""
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
        async with client, client.stream("GET", self._url, params={"q": words, "format": "json"}) as response:
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
