"""Which web pages may ask, and what a browser wants to hear of it (WHATWG Fetch, 3.3).

With keys any page may ask, since it needs one. Without keys every page a user happens to visit could read private
documents through the loopback address, so only pages of this machine may, and applications with a scheme of their own.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from paceline.settings import is_loopback

Headers = list[tuple[bytes, bytes]]

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_METHODS = b"GET, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, openai-processing-ms, retry-after"
_USUAL = b"authorization, content-type"


def is_local_origin(origin: str) -> bool:
    """A page of this machine, or an application (`app://…`). Not `null`: a sandboxed frame of any page says that."""
    try:
        url = urlsplit(origin)
        host = url.hostname or ""
    except ValueError:
        return False
    if url.scheme in ("http", "https"):
        return is_loopback(host) or host.endswith(".localhost")
    return bool(url.scheme) and origin != "null"


def answer_headers(origin: bytes) -> Headers:
    """For every answer to a page that may ask, errors and streams included."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]


def preflight_headers(asked: bytes | None, *, private_network: bool) -> Headers:
    """What the browser asked for is allowed back: `*` would not cover Authorization, and SDKs send x-stainless-*."""
    allowed = asked if asked is not None and _HEADER_NAMES.fullmatch(asked) else _USUAL
    headers = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", allowed),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]
    return [*headers, (b"access-control-allow-private-network", b"true")] if private_network else headers
