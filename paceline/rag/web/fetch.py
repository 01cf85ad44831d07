"""A page fetched from the web, where strangers choose the URL: only from public addresses, and within limits.

The addresses of a host are looked up once and checked, and the connection goes to one of those that were checked, so a
name that leads elsewhere a moment later (DNS rebinding) is no way around it; the `Host` header and the TLS certificate
are still those of the name. Each redirect is a new URL with the same checks. Nothing is sent but the request: no
cookies, passwords or referrer, and not through a proxy of the environment.

Not handled: robots.txt, pages that scripts write, HTTP/2.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass

import httpx

from paceline import __version__
from paceline.core.strangers import Address, parsed_address
from paceline.errors import WebError
from paceline.rag.web.addresses import is_public
from paceline.rag.web.body import ACCEPTED_ENCODINGS, read_body
from paceline.rag.web.resolver import Resolver, SystemResolver
from paceline.rag.web.urls import WEB_PORTS, Target, shown, target_of

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


class PageFetcher:
    """Fetches http and https URLs. For one event loop."""

    def __init__(
        self,
        limits: FetchLimits = DEFAULTS,
        *,
        resolve: Resolver | None = None,
        allowed: Callable[[Address], bool] = is_public,
        ports: Collection[int] = WEB_PORTS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """resolve: looks up hosts that are names; None: as the system does. allowed: the addresses to connect to; it
        is given IPv4 addresses in IPv6 as IPv4. tls: whose certificates are believed; None: the usual authorities.
        """
        self._limits = limits
        self._resolve = resolve or SystemResolver(limits.at_once)
        self._allowed = allowed
        self._ports = ports
        self._tls = tls or httpx.create_ssl_context()
        self._slots = asyncio.Semaphore(limits.at_once)

    async def fetch(self, url: str) -> Page:
        """Raises WebError for what may not be fetched, cannot be reached, or is no document."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._limits.total_s):
                    return await self._followed(target_of(url, self._ports))
            except TimeoutError:
                raise WebError(f"{shown(url)} takes more than {self._limits.total_s:g} s.") from None

    # ---- internal ---------------------------------------------------------------------------------------------------
    async def _followed(self, target: Target) -> Page:
        first = target
        for _ in range(self._limits.redirects + 1):
            answer = await self._get(target)
            if isinstance(answer, Page):
                return answer
            if target.url.scheme == "https" and answer.url.scheme == "http":
                raise WebError(f"{shown(first.url)} leads from https to http, where anyone could change it.")
            target = answer
        raise WebError(f"{shown(first.url)} leads on more than {self._limits.redirects} times.")

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
            if address is None or not self._allowed(address):
                raise WebError(f"{shown(target.url)} is not fetched: {target.host} is not at a public address.")
            addresses[address] = None
        return list(addresses)[:_MAX_ADDRESSES]

    async def _request(self, target: Target, address: Address) -> Page | Target:
        total_s = self._limits.total_s
        request = httpx.Request(
            "GET",
            target.url.copy_with(host=str(address)),
            headers={"Host": target.url.netloc.decode("ascii"), **_HEADERS},
            extensions={
                "sni_hostname": target.host,  # the name that the certificate must be for, too
                "timeout": {"connect": self._limits.connect_s, "read": total_s, "write": total_s, "pool": total_s},
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
            return target_of(target.url.join(response.headers["location"]), self._ports)
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
        data = await read_body(response, url, self._limits.body_bytes)
        charset = _CHARSET.search(content_type)
        return Page(str(target.url), target.host[:_MAX_NAME] + suffix, data, charset[1] if charset else "")


def _is_untrusted(error: BaseException | None) -> bool:
    """True if the error comes from a certificate that was not believed."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__  # httpcore takes the cause away and leaves the context
    return error is not None
