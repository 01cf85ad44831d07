"""CORS headers, and the hosts and origins accepted without keys (WHATWG Fetch, 3.3).

With keys any page may send requests, since it needs a key. Without keys any page a user visits could read private
documents through the loopback address, so only pages of this machine are accepted, the schemes under which desktop and
mobile applications load their own pages, and the origins of a setting. Browser extensions and editors' webviews, which
run what others wrote, have schemes too: they are named in that setting or refused.

The origin is not enough: with DNS rebinding, a page whose name points to this machine after it was loaded sends
same-origin requests, without an `Origin`. So the host it names must be this machine, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from paceline.local_users import is_loopback

APPLICATIONS = frozenset({"app", "capacitor", "ionic", "tauri"})  # no page that was loaded from elsewhere has these

Headers = list[tuple[bytes, bytes]]

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_METHODS = b"GET, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, request-id, x-client-request-id, openai-processing-ms, retry-after"
_USUAL = b"authorization, content-type"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]*)?", re.IGNORECASE)  # RFC 9110, 7.2: a name and a port
_PAGE = re.compile(rf"https?://{_HOST.pattern}", re.IGNORECASE)
_APPLICATION = re.compile(rf"({'|'.join(sorted(APPLICATIONS))})://(?:{_HOST.pattern})?", re.IGNORECASE)
_PROXIES = (b"x-forwarded-", b"forwarded", b"via", b"x-real-ip", b"cf-connecting-ip", b"true-client-ip")


def is_local_host(host: str | None) -> bool:
    """True if a `Host` header names this machine. A missing one does not: every browser sends it."""
    named = _HOST.fullmatch(host or "")
    return named is not None and _is_local(named[1].lower())


def is_proxied(names: Iterable[bytes]) -> bool:
    """True if a header is one that a proxy or a tunnel adds to a request. names: of all headers, in lower case."""
    return any(name in _PROXIES or name.startswith(_PROXIES[0]) for name in names)


def is_local_origin(origin: str, allowed: Collection[str] = ()) -> bool:
    """True if an origin is a page of this machine, an application (`app://…`) or one of those allowed besides. `null`
    is none of them: a sandboxed frame of any page sends it."""
    if origin.lower() in allowed:
        return True
    page = _PAGE.fullmatch(origin)
    return _is_local(page[1].lower()) if page is not None else _APPLICATION.fullmatch(origin) is not None


def _is_local(name: str) -> bool:
    """Browsers resolve `*.localhost` to loopback themselves, whatever the DNS says (RFC 6761, 6.3)."""
    return is_loopback(name) or name.endswith(".localhost")


def answer_headers(origin: bytes) -> Headers:
    """Headers of every answer to an accepted origin, errors and streams included."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]


def preflight_headers(asked: bytes | None, *, private_network: bool) -> Headers:
    """Allow the headers that the browser asked for: `*` would not cover Authorization, and SDKs send x-stainless-*."""
    allowed = asked if asked is not None and _HEADER_NAMES.fullmatch(asked) else _USUAL
    headers = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", allowed),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]
    return [*headers, (b"access-control-allow-private-network", b"true")] if private_network else headers
