"""The web: searching it, and fetching pages whose addresses strangers have chosen.

A query leaves this machine: whoever calls decides whether it may. A page comes only from public addresses, and within
limits. The addresses of a host are looked up once and checked, and the connection goes to one of those that were
checked, so a name that leads elsewhere a moment later (DNS rebinding) is no way around it; the `Host` header and the
TLS certificate are still those of the name. Each redirect is a new URL with the same checks. Nothing is sent but the
request: no cookies, passwords or referrer, and not through a proxy of the environment.

Not handled: robots.txt, pages that scripts write, HTTP/2.
"""

from __future__ import annotations

import asyncio
import codecs
import ipaddress
import json
import re
import socket
import ssl
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import islice
from typing import NamedTuple, cast

import httpx
import msgspec

from paceline import __version__
from paceline.core.addresses import Address, parsed_address
from paceline.core.printable import one_line, printable
from paceline.errors import ConfigError, DocumentError, ParserLost, WebError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS, Chunk, split_document
from paceline.rag.parsing.process import Around, ParserPool, memory_file
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


# Which IP addresses are public: unicast, and reachable by anyone on the Internet.
#
# The tables are those of IANA's registries of special-purpose addresses (RFC 6890), written down here because Python's
# `is_global` differs between releases, and calls multicast, NAT64 and 6to4 global. IPv6 is public only within
# 2000::/3, the part that is assigned for global unicast, so whatever is assigned later is refused until it is added
# here.


_SPECIAL_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private, as are 172.16.0.0/12 and 192.168.0.0/16
        "100.64.0.0/10",  # of providers (CGNAT); some clouds' metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # public by its number, and on each machine of Azure the platform's own service
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocols; Oracle's metadata
        "192.0.2.0/24",  # documentation, as are 198.51.100.0/24 and 203.0.113.0/24
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocols, among them Teredo, which contains IPv4 addresses
        "2001:db8::/32",  # documentation, as is 3fff::/20
        "2002::/16",  # 6to4, which contains IPv4 addresses
        "3fff::/20",
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are the IPv4 address that is reached


def is_public(address: Address) -> bool:
    """True if the address is public. Of NAT64, where resolvers give it for names that have IPv4 only, if that is.

    Not known: a network's own NAT64 prefix, and which public addresses are this machine's or its neighbours'.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _UNICAST_V6 and not any(address in network for network in _SPECIAL_V6)


# An HTTP answer's body within a limit of bytes, before and after decompression.
#
# httpx would decompress what has arrived whole, a thousandfold of it in memory; here the limit holds while
# decompressing.


ACCEPTED_ENCODINGS = "gzip"
_GZIP_BITS = 16 + zlib.MAX_WBITS  # of zlib: a gzip header is required


async def read_body(response: httpx.Response, name: str, max_bytes: int) -> bytes:
    """The decoded body. `name`: whose it is, for errors. What follows the first member of a gzip file is left out.

    Raises WebError for one of more than max_bytes, compressed otherwise than with gzip, or damaged; httpx.HTTPError as
    httpx does.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", ""):
        raise WebError(f"{name} is compressed in a way that was not asked for.")
    inflater = zlib.decompressobj(_GZIP_BITS) if "gzip" in encoding else None
    parts: list[bytes] = []
    received = size = 0
    async with aclosing(cast(AsyncGenerator[bytes, None], response.aiter_raw())) as pieces:
        async for piece in pieces:
            received += len(piece)
            part = piece if inflater is None else _inflated(inflater, piece, name, max_bytes - size + 1)
            size += len(part)
            if max(size, received) > max_bytes:
                raise WebError(f"{name} has more than {max_bytes >> 10} KiB.")
            parts.append(part)
            if inflater is not None and inflater.eof:
                break
    if inflater is not None and not inflater.eof:
        raise WebError(f"{name} ends in the middle.")
    return b"".join(parts)


def _inflated(inflater: zlib._Decompress, data: bytes, name: str, room: int) -> bytes:
    """What the data decompress to, `room` bytes at most."""
    try:
        return inflater.decompress(data, room)
    except zlib.error:
        raise WebError(f"{name} is compressed and damaged.") from None


# Addresses of names, as this machine's resolver gives them.


Resolver = Callable[[str, int], Awaitable[Sequence[str]]]  # (host, port) -> addresses; none for an unknown name


class SystemResolver:
    """In threads of its own: a look-up cannot be cancelled, and strangers' name servers may be slow for half a minute,
    in which others of the program's threads must not be missing.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "paceline-resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """In the order in which they should be tried."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, _addresses, host, port)


def _addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


# Which URLs may be fetched, as far as their text tells; where a name leads, its resolver does.
#
# A host is a name or an address in its usual form. The other forms that programs accept for an address (decimal,
# octal, hexadecimal, with fewer parts, with a zone) are refused: nobody links to them.


MAX_URL = 2048  # characters
WEB_PORTS = frozenset({80, 443})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")  # a host that ends in one is an address to many programs
_MAX_SHOWN = 200  # characters of a URL in an error


class Target(NamedTuple):
    """A URL that may be fetched if its host has public addresses only."""

    url: httpx.URL  # without fragment
    host: str  # in lower case, without a final dot; an IPv6 address without brackets
    port: int


def target_of(url: str | httpx.URL, ports: Collection[int] = WEB_PORTS) -> Target:
    """Raises WebError for a URL that may not be fetched."""
    if len(str(url)) > MAX_URL:
        raise WebError(f"{shown(url)} is longer than {MAX_URL} characters.")
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii").removesuffix(".")
    except (httpx.InvalidURL, ValueError):
        raise WebError(f"{shown(url)} is no valid URL.") from None
    if parsed.scheme not in _DEFAULT_PORTS:
        raise WebError(f"{shown(url)} is not fetched: only http and https are.")
    if parsed.userinfo:
        raise WebError("A URL with a user name or password is not fetched.")
    if not _is_usual(host):
        raise WebError(f"{shown(url)} is not fetched: its host is neither a name nor a usual form of an address.")
    port = _DEFAULT_PORTS[parsed.scheme] if parsed.port is None else parsed.port
    if port not in ports:
        raise WebError(f"{shown(url)} is not fetched: port {port} is not of the web.")
    return Target(parsed.copy_with(fragment=None), host, port)


def _is_usual(host: str) -> bool:
    if "%" in host:  # a zone, which `parsed_address` would leave out
        return False
    return parsed_address(host) is not None or bool(_NAME.fullmatch(host) and not _NUMBER.fullmatch(host))


def shown(url: str | httpx.URL) -> str:
    """A URL as errors show it: on one line, its beginning, without a password."""
    text = re.sub(r"//[^/?#]*@", "//", str(url))
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")


# The end of a file's name by media type: the kinds of documents that uploads may have, as servers name them.
SUFFIXES = {
    "text/html": ".html",
    "application/xhtml+xml": ".xhtml",
    "text/plain": ".txt",
    "text/markdown": ".md",
    "text/csv": ".csv",
    "application/json": ".json",
    "application/pdf": ".pdf",
    "application/epub+zip": ".epub",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
}
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_ADDRESSES = 4  # of one host, tried one after the other
_MAX_NAME = 200  # characters of a host in a document's name
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([A-Za-z0-9_.:-]{1,40})", re.I)
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=0)  # a connection serves one name, once
_HEADERS = {
    "User-Agent": f"paceline/{__version__}",
    "Accept": "text/html, application/pdf;q=0.9, text/*;q=0.9, */*;q=0.1",
    "Accept-Encoding": ACCEPTED_ENCODINGS,
    "Connection": "close",
}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What fetching one page may take. Its status line and headers are limited to 100 KiB by httpx."""

    total_s: float = 20.0  # redirects and looking up names included
    connect_s: float = 5.0  # to one address
    redirects: int = 5
    body_bytes: int = 8 * 2**20  # decompressed
    at_once: int = 8  # pages; others wait


DEFAULTS = FetchLimits()


@dataclass(frozen=True, slots=True)
class Page:
    url: str  # after redirects
    name: str  # as of a file: the host, and an end that tells the kind
    data: bytes
    charset: str  # as the server declares it; "" if it does not


@dataclass(eq=False, repr=False)
class PageFetcher:
    """Fetches http and https URLs. For one event loop."""

    limits: FetchLimits = DEFAULTS
    _: KW_ONLY
    resolve: InitVar[Resolver | None] = None  # looks up hosts that are names; None: as the system does
    allowed: Callable[[Address], bool] = is_public  # to connect to these addresses; IPv4 in IPv6 is given as IPv4
    ports: Collection[int] = WEB_PORTS
    tls: InitVar[ssl.SSLContext | None] = None  # whose certificates are believed; None: the usual authorities

    def __post_init__(self, resolve: Resolver | None, tls: ssl.SSLContext | None) -> None:
        self._resolve = resolve or SystemResolver(self.limits.at_once)
        self._tls = tls or httpx.create_ssl_context()
        self._slots = asyncio.Semaphore(self.limits.at_once)

    async def fetch(self, url: str) -> Page:
        """Raises WebError for what may not be fetched, cannot be reached, or is no document."""
        async with self._slots:
            try:
                async with asyncio.timeout(self.limits.total_s):
                    return await self._followed(target_of(url, self.ports))
            except TimeoutError:
                raise WebError(f"{shown(url)} takes more than {self.limits.total_s:g} s.") from None

    # ---- internal ---------------------------------------------------------------------------------------------------
    async def _followed(self, target: Target) -> Page:
        first = target
        for _ in range(self.limits.redirects + 1):
            answer = await self._get(target)
            if isinstance(answer, Page):
                return answer
            if target.url.scheme == "https" and answer.url.scheme == "http":
                raise WebError(f"{shown(first.url)} leads from https to http, where anyone could change it.")
            target = answer
        raise WebError(f"{shown(first.url)} leads on more than {self.limits.redirects} times.")

    async def _get(self, target: Target) -> Page | Target:
        """The page, or where it leads."""
        failure: httpx.HTTPError | None = None
        for address in await self._addresses(target):
            try:
                return await self._request(target, address)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
            except httpx.HTTPError as error:
                raise WebError(f"{shown(target.url)} is not answered as HTTP asks ({type(error).__name__}).") from error
        if _is_untrusted(failure):
            raise WebError(f"{shown(target.url)} is not fetched: {target.host} has no valid certificate.") from failure
        raise WebError(f"{shown(target.url)} cannot be reached.") from failure

    async def _addresses(self, target: Target) -> list[Address]:
        """All public. Raises WebError if one is not, since such a name may be one's own network's."""
        is_literal = parsed_address(target.host) is not None
        found = [target.host] if is_literal else await self._resolve(target.host, target.port)
        if not found:
            raise WebError(f"{shown(target.url)} cannot be reached: {target.host} is not known.")
        addresses: dict[Address, None] = {}
        for each in found:
            address = parsed_address(each)
            if address is None or not self.allowed(address):
                raise WebError(f"{shown(target.url)} is not fetched: {target.host} is not at a public address.")
            addresses[address] = None
        return list(addresses)[:_MAX_ADDRESSES]

    async def _request(self, target: Target, address: Address) -> Page | Target:
        total_s = self.limits.total_s
        request = httpx.Request(
            "GET",
            target.url.copy_with(host=str(address)),
            headers={"Host": target.url.netloc.decode("ascii"), **_HEADERS},
            extensions={
                "sni_hostname": target.host,  # the name that the certificate must be for, too
                "timeout": {"connect": self.limits.connect_s, "read": total_s, "write": total_s, "pool": total_s},
            },
        )
        # A transport instead of a client: it knows neither cookies nor redirects, proxies or .netrc.
        async with (
            httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=_ONE) as transport,
            aclosing(await transport.handle_async_request(request)) as response,
        ):
            if response.status_code in _REDIRECTS:
                return self._redirected(target, response)
            return await self._page(target, response)

    def _redirected(self, target: Target, response: httpx.Response) -> Target:
        try:
            return target_of(target.url.join(response.headers["location"]), self.ports)
        except (KeyError, ValueError, httpx.InvalidURL):
            raise WebError(f"{shown(target.url)} leads to no valid URL.") from None

    async def _page(self, target: Target, response: httpx.Response) -> Page:
        url = shown(target.url)
        if response.status_code != 200:
            raise WebError(f"{url} is answered with status {response.status_code}.")
        content_type = response.headers.get("content-type", "")
        suffix = SUFFIXES.get(content_type.partition(";")[0].strip().lower())
        if suffix is None:
            raise WebError(f"{url} is no page or document that can be read.")
        data = await read_body(response, url, self.limits.body_bytes)
        charset = _CHARSET.search(content_type)
        return Page(str(target.url), target.host[:_MAX_NAME] + suffix, data, charset[1] if charset else "")


def _is_untrusted(error: BaseException | None) -> bool:
    """True if the error comes from a certificate that was not believed."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__  # httpcore takes the cause away and leaves the context
    return error is not None


# A page's text in passages: fetched, parsed by the process that parses uploads, within its limits, and divided.


_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class WebPage:
    """A page as read. Its text is a stranger's."""

    url: str  # after redirects
    title: str  # "" when it has none
    passages: tuple[Chunk, ...]


async def read_page(
    url: str,
    fetcher: PageFetcher,
    parsers: ParserPool,
    count: Callable[[str], int],
    *,
    most: int,
    around: Around = nullcontext,
) -> WebPage:
    """At most so many passages of a page. count: tokens of a text, as of the embedder; called in other threads. around:
    parsing, see `ParserPool.submit`. Raises WebError for what cannot be fetched or read."""
    page = await fetcher.fetch(url)
    try:
        parsed = await asyncio.wrap_future(parsers.submit(page.name, lambda: memory_file(_declared(page)), around))
    except (DocumentError, ParserLost) as error:
        raise WebError(str(error)) from error
    chunks = split_document(parsed, count, chunk_tokens=CHUNK_TOKENS, overlap=OVERLAP_TOKENS)
    passages = await asyncio.to_thread(lambda: tuple(islice(chunks, most)))
    return WebPage(page.url, parsed.title, passages)


def _declared(page: Page) -> bytes:
    """The page's bytes; HTML with the server's character set written before the page's own declaration, as it precedes
    that in browsers too.
    """
    if not page.charset or not page.name.endswith(".html") or page.data.startswith(_MARKS):
        return page.data
    return f'<meta charset="{page.charset}">'.encode("ascii") + page.data
