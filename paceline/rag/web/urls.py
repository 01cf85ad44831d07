"""Which URLs may be fetched, as far as their text tells. Pure; where a name leads, `fetch` finds out.

A host is a name or an address in its usual form. The other forms that programs accept for an address (decimal, octal,
hexadecimal, with fewer parts, with a zone) are refused: nobody links to them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

import httpx

from paceline.core.printable import printable
from paceline.core.strangers import parsed_address
from paceline.errors import WebError

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
