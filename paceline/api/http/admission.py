"""Admission of connections and of requests before routing (host, origin, key, number of requests), and the headers of
every answer.

Deny by default: a path needs a key unless its route is open. All checks precede the first byte of the body. Requests
with a key take places of their own, and each key a share of them; what needs no key cannot use them up. An
exception that no route caught becomes an error envelope here. Logs method, path, status and time; never content.

A connection belongs to a stranger until a key on it is accepted (any request, where none is required) or a device's
credential. So silent connections, half heads, bodies of open routes and unadmitted WebSockets are counted together,
by address and in all (`core.addresses.Strangers`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.api.http.auth import NOBODY, Identity, Keyring
from paceline.api.http.body import BrokenOffError, ClientGoneError, within
from paceline.api.http.errors import RETRY, ErrorShape, Failure, RefusedError, failure_of
from paceline.api.observation import new_request_id, request_id
from paceline.core.addresses import Strangers, counted_address, is_loopback, parsed_address
from paceline.core.fair import Shares
from paceline.errors import PacelineError
from paceline.runtime.link.transport import CONNECTION
from paceline.settings_tables import TUNING

if TYPE_CHECKING:
    from paceline.api.http.hop import Hops


# ---- the address behind a connection or a request, as limits by address count it -------------------------------------
# Behind a reverse proxy all connections have the proxy's address. Only where it is named as trusted are its headers
# `X-Forwarded-For` and `X-Forwarded-Proto` believed: anyone can send them.
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_MAX_HOPS = 16  # of proxies one behind the other


def networks(entries: Iterable[str]) -> tuple[Network, ...]:
    """Addresses or networks such as 10.0.0.0/8. Raises ValueError for an invalid one."""
    return tuple(ipaddress.ip_network(entry, strict=False) for entry in entries)


def _is_trusted(peer: str, trusted: Sequence[Network]) -> bool:
    address = parsed_address(peer) if trusted else None
    return address is not None and any(address in network for network in trusted)


def client_address(peer: str, headers: Iterable[tuple[bytes, bytes]], trusted: Sequence[Network]) -> str:
    """The address that a request counts for. `peer`: of its connection; empty where it has none."""
    if not _is_trusted(peer, trusted):
        return counted_address(peer)
    values = b",".join(value for name, value in headers if name == b"x-forwarded-for")
    hops = values.decode("latin-1").split(",")
    for hop in hops[: -_MAX_HOPS - 1 : -1]:  # each proxy appends the address that it was reached from
        if parsed_address(hop.strip()) is None:
            break
        peer = hop.strip()
        if not _is_trusted(peer, trusted):
            break
    return counted_address(peer)


GRACE_S = 0.25  # until a new connection counts: one whose head is here already is known before


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """`trusted`: reverse proxies whose word on the sender's address is taken. Where no key is required: `origins`,
    those let in besides local pages (`is_local_origin`); `every_user`, whether other users of this machine
    are let in, too."""

    strangers_per_address: int = TUNING.strangers_per_address
    trusted: tuple[Network, ...] = ()
    origins: frozenset[str] = frozenset()
    every_user: bool = False

    def address_of(self, scope: object) -> str:
        """The address that a request counts for, by its ASGI scope."""
        assert isinstance(scope, dict)
        client = scope.get("client")
        return client_address(client[0] if client else "", scope["headers"], self.trusted)

    def scheme_of(self, scope: Scope) -> str:
        """`https` where a request came to a trusted proxy by that."""
        client, headers = scope.get("client"), dict(scope["headers"])
        is_https = headers.get(b"x-forwarded-proto", b"").lower() == b"https"
        return "https" if is_https and client and _is_trusted(client[0], self.trusted) else str(scope["scheme"])


class Visitor:
    """One connection, from its beginning to `gone`. Belongs to the event loop."""

    def __init__(
        self, doors: Doors, peer: str, abort: Callable[[], None], own_user: Callable[[], bool] = lambda: True
    ) -> None:
        """abort: break the connection at once. own_user: whether it is of this program's user; asked once at most."""
        self.abort = abort
        self.known = False
        # A trusted proxy may open as many connections as it likes before it says for whom.
        self.address = None if _is_trusted(peer, doors.limits.trusted) else counted_address(peer)
        self._is_own_user = own_user
        self._doors = doors
        self._owner: str | None = None  # whose share the connection is part of
        self._gone = False

    @cached_property
    def is_own_user(self) -> bool:
        """The connection comes from the user who runs this program, or from root. For a keyless server."""
        return self._is_own_user()

    def linger(self) -> None:
        """Some time has passed: count it if it is still a stranger's."""
        if not self.known and not self._gone:
            self._come()

    def _come(self) -> None:
        """Count a stranger, and cut another if that is one too many."""
        for each in self._doors.strangers.come(self, self.address):
            each.abort()

    def speak_for(self, address: str) -> None:
        """A request has come, for this address."""
        if address != self.address:
            counted_before = self._doors.strangers.leave(self)
            self.address = address
            if counted_before:
                self._come()

    def identify(self, owner: str) -> bool:
        """A request of this owner has been accepted. False if it has too many connections; then nothing changes."""
        if self._owner != owner and not self._gone:
            if not self._doors.shares.take(owner):
                return False
            self._give_back()
            self._owner = owner
        self.admitted()
        return True

    def admitted(self) -> None:
        """Its sender is known now."""
        self.known = True
        self._doors.strangers.leave(self)

    def upgraded(self) -> None:
        """It is a WebSocket from now on, which has to introduce itself, whoever used the connection before."""
        if self.known:
            self.known = False
            self._give_back()
            self._come()

    def gone(self) -> None:
        self._gone = True
        self._doors.strangers.leave(self)
        self._give_back()

    def _give_back(self) -> None:
        if self._owner is not None:
            self._doors.shares.give_back(self._owner)
            self._owner = None


class Doors:
    def __init__(self, limits: DoorLimits, max_connections: int) -> None:
        self.limits = limits
        self.max_strangers = max(1, max_connections // 2)
        self.shares = Shares(max_connections)  # of owners, in connections
        self.strangers: Strangers[Visitor] = Strangers(limits.strangers_per_address, self.max_strangers)


# ---- CORS headers, and the hosts and origins accepted without keys (WHATWG Fetch, 3.3) -------------------------------
# With keys any page may send requests, since it needs a key. Without keys any page a user visits could read private
# documents through the loopback address, so only pages of this machine are accepted, the schemes under which desktop
# and mobile applications load their own pages, and the origins of a setting. Browser extensions and editors' webviews,
# which run what others wrote, have schemes too: they are named in that setting or refused.
#
# The origin is not enough: with DNS rebinding, a page whose name points to this machine after it was loaded sends
# same-origin requests, without an `Origin`. So the host it names must be this machine, too.
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


def _is_proxied(names: Iterable[bytes]) -> bool:
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


def _answer_headers(origin: bytes) -> Headers:
    """Headers of every answer to an accepted origin, errors and streams included."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]


def _preflight_headers(asked: bytes | None, *, private_network: bool) -> Headers:
    """Allow the headers that the browser asked for: `*` would not cover Authorization, and SDKs send x-stainless-*."""
    allowed = asked if asked is not None and _HEADER_NAMES.fullmatch(asked) else _USUAL
    headers = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", allowed),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]
    return [*headers, (b"access-control-allow-private-network", b"true")] if private_network else headers


PROBES = frozenset({"/healthz", "/readyz", "/metrics"})  # requested every few seconds, so logged at DEBUG
MAX_ACTIVE = 1440  # POSTs at a time, of which one key may have 1,280 (`core.fair`); the service admits fewer answers
MAX_OPEN = 64  # POSTs to open routes at a time
MAX_OPEN_PER_ADDRESS = 8
MAX_UNREAD = 1 << 30  # bytes of large answers in memory that their clients have not read
MAX_UNREAD_PER_KEY = MAX_UNREAD // 4
OPEN_BODY_S = 5.0  # for the body of one, whoever sends it

CLIENT_REQUEST_ID = b"x-client-request-id"  # up to 512 characters, as at OpenAI
_ABSOLUTE = re.compile(rb"(?:https?|wss?)://([^/]*)(/.*)?", re.IGNORECASE)
_CLIENT_REQUEST = re.compile(rb"[\x20-\x7e]{1,512}")

PRIVATE: Headers = [  # of every answer that does not say otherwise
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),  # without CORS no page of another origin gets to hold it
    (b"cache-control", b"no-store"),
]

_CLOSE = {"Connection": "close"}
_FOREIGN = {  # what a server without keys says, by the code
    "host_not_allowed": "A server that has no keys answers to localhost and loopback addresses only, and was asked by "
    "another name: make a key, and it answers to any.",
    "proxy_not_allowed": "A server that has no keys answers its own machine only, and this request came through a "
    "proxy or a tunnel: make a key, and it answers through any.",
    "origin_not_allowed": "Pages of other machines and browser extensions may not use a server that has no keys: make "
    "one, and they may, or start it with this one in --allowed-origins.",
    "user_not_allowed": "A server that has no keys answers the user who started it, and this request comes from "
    "another user of the machine: make a key, or set local_users = 'any' in [tuning] of its file.",
}
NOTICE_S: Final = 2.0  # twice the time between two looks of a balancer (`deploy/Caddyfile.fleet`)

_log = logging.getLogger("paceline.api")


class AdmissionControl:
    """Active requests by key or address and the state of draining, shared by the middleware, `/readyz` and the
    shutdown."""

    def __init__(self, keyring: Keyring, limits: DoorLimits | None = None) -> None:
        self.keyring = keyring
        self.limits = limits or DoorLimits()
        self.open_paths: set[str] = set()  # filled by `app.include`, and so are the next
        self.error_shapes: dict[str, ErrorShape] = {}  # by prefix, where it is not OpenAI's
        self.hops: Hops | None = None  # to the other servers of one database
        self.leaving = False  # not ready any more
        self.draining = False  # from then on new requests are refused
        self.on_drain: Callable[[], Awaitable[None]] | None = None  # before active requests are waited for
        self.cuts: set[Callable[[], None]] = set()  # each ends an answer that a drain does not wait for any longer
        self.refused: Counter[int] = Counter()  # requests by the status of their refusal
        self._places = Shares(MAX_ACTIVE)  # of keys
        self._open_places = Shares(MAX_OPEN, most=MAX_OPEN_PER_ADDRESS)  # of addresses
        self.unread = Shares(MAX_UNREAD, most=MAX_UNREAD_PER_KEY)  # of keys, in bytes
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        return self._places.taken + self._open_places.taken

    def error_shape(self, path: str) -> ErrorShape | None:
        """How errors of a path are written, known or not; None: as OpenAI does."""
        found = (each for prefix, each in self.error_shapes.items() if path == prefix or path.startswith(f"{prefix}/"))
        return next(found, None)

    def enter(self, owner: str = "", *, is_open: bool = False) -> None:
        """Admit one request, to be ended by `leave`. owner: its key, empty where none is required; of an open route,
        its address. Raises RefusedError."""
        closing = _CLOSE if is_open else {}  # what is left of its body is not read
        if self.draining:
            message = "This server is shutting down."
            raise RefusedError(Failure(503, message, "server_error", "shutting_down", headers=RETRY | closing))
        places = self._open_places if is_open else self._places
        if not places.take(owner):
            whose = "from this address, to routes that need no key," if is_open else "of this key"
            message = (
                f"{places.held(owner)} requests {whose} are being answered, and {places.taken} in all, of "
                f"{places.places}. Please try again later."
            )
            raise RefusedError(Failure(429, message, "rate_limit_error", "too_many_requests", headers=RETRY | closing))
        self._idle.clear()

    def stay(self, key: str) -> None:
        """Count background work of a key that outlives its request, until it calls `leave`."""
        self._places.force(key)
        self._idle.clear()

    def leave(self, owner: str = "", *, is_open: bool = False) -> None:
        (self._open_places if is_open else self._places).give_back(owner)
        if not self.active:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse new requests, once balancers have seen that others are to have them, and wait until the active ones
        have left."""
        self.leaving = True
        if self.hops is not None:
            await asyncio.sleep(NOTICE_S)
        self.draining = True
        if self.on_drain is not None:
            await self.on_drain()
        await self._idle.wait()


class AdmissionMiddleware:
    """ASGI middleware of `AdmissionControl`. Of WebSockets it knows only their connections: the first message carries
    the credential, with or without keys."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self.app = app
        self.admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _to_origin_form(scope)
        visitor: Visitor | None = scope.setdefault("state", {}).get(CONNECTION)
        if visitor is not None:
            visitor.speak_for(self.admission.limits.address_of(scope))
        if scope["type"] != "http":
            await self._socket(scope, receive, send, visitor)
            return
        scope["scheme"] = self.admission.limits.scheme_of(scope)  # in addresses that its answer has
        hopped = "" if self.admission.hops is None else self.admission.hops.came(scope)
        exchange = _Exchange(scope, send, self.admission.error_shape(scope["path"]), hopped)
        request = f"{scope['method']} {scope.get('raw_path', b'')[:256].decode('latin-1')}"  # still percent-encoded
        if scope["method"] == "HEAD":  # uvicorn leaves the body out; FastAPI's routes would refuse it
            scope = {**scope, "method": "GET"}
        try:
            await self._answer(scope, receive, exchange)
        except ClientGoneError:
            _log.info("%s: the client left (%s)", request, exchange.id)
        except BrokenOffError as error:
            _log.warning("%s was broken off after it had begun: %s (%s)", request, error, exchange.id)
            return  # with its body unfinished, the connection is closed
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("%s failed (%s)", request, exchange.id)
            if exchange.status is not None:
                raise  # the answer has begun: all that is left is to close the connection
            await exchange.refuse(failure_of(error), receive)
        if exchange.status is not None:
            if exchange.status >= 400:
                self.admission.refused[exchange.status] += 1
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            _log.log(level, "%s %d %.0f ms %s", request, exchange.status, exchange.ms(), exchange.id)

    async def _socket(self, scope: Scope, receive: Receive, send: Send, visitor: Visitor | None) -> None:
        if visitor is None:
            await self.app(scope, receive, send)
            return
        visitor.upgraded()
        try:
            await self.app(scope, receive, send)
        finally:
            visitor.gone()

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        """Raises RefusedError, and what the application raises."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        is_open = scope["path"] in self.admission.open_paths
        # A probe is answered also while a database of keys is away.
        is_checked = not (is_open and origin is None) and not (await self.admission.keyring.now()).required
        if is_checked and (code := self._foreign(scope, headers, is_open=is_open)):
            raise RefusedError(Failure(403, _FOREIGN[code], code=code))
        if origin is not None:
            exchange.extra += _answer_headers(origin)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            private = headers.get(b"access-control-request-private-network") == b"true"
            allowed = _preflight_headers(headers.get(b"access-control-request-headers"), private_network=private)
            await exchange.send({"type": "http.response.start", "status": 204, "headers": allowed})
            await exchange.send({"type": "http.response.body", "body": b""})
            return
        if not scope.get("raw_path", b"/").startswith(b"/"):
            raise RefusedError(Failure(400, "The path of a request begins with a slash, which is not escaped."))
        scope["state"]["identity"] = NOBODY if is_open else await self._identified(scope, headers)
        _check_encoding(headers)
        if scope["method"] != "POST":
            await self.app(scope, receive, exchange.send)
            return
        owner = self.admission.limits.address_of(scope) if is_open else scope["state"]["identity"].key
        self.admission.enter(owner, is_open=is_open)
        try:
            await self.app(scope, within(receive, OPEN_BODY_S) if is_open else receive, exchange.send)
        finally:
            self.admission.leave(owner, is_open=is_open)

    def _foreign(self, scope: Scope, headers: Mapping[bytes, bytes], *, is_open: bool) -> str:
        """Why a server without keys refuses this host, origin, proxy or user of the machine, as an error code; empty if
        it does not. Open routes are served to any user under any host name: they need no key anyway, and devices reach
        them through a proxy."""
        limits, origin = self.admission.limits, _text(headers.get(b"origin"))
        if not is_open and not is_local_host(_text(headers.get(b"host"))):
            return "host_not_allowed"
        if not is_open and _is_proxied(headers):  # a tunnel runs as this user, and may rewrite the host
            return "proxy_not_allowed"
        if not is_open and origin is None and headers.get(b"sec-fetch-site") == b"cross-site":
            return "origin_not_allowed"
        if origin is not None and not is_local_origin(origin, limits.origins):
            return "origin_not_allowed"
        visitor: Visitor | None = scope["state"].get(CONNECTION)
        if not is_open and not limits.every_user and visitor is not None and not visitor.is_own_user:
            return "user_not_allowed"
        return ""

    async def _identified(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Identity:
        key, keyring = _presented(headers), await self.admission.keyring.now()
        identity = keyring.identify(key)
        if identity is None:
            missing = "No API key provided: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            message = missing if key is None else "Incorrect API key provided."
            if (expired := keyring.expired(key)) is not None:
                message = time.strftime("This API key expired on %Y-%m-%d: have it extended.", time.gmtime(expired))
            asks = {"WWW-Authenticate": "Bearer"}
            raise RefusedError(Failure(401, message, code="invalid_api_key", headers=asks))
        visitor: Visitor | None = scope["state"].get(CONNECTION)
        if visitor is not None and not visitor.identify(identity.key):
            message = "This key has too many connections open: close idle ones, or use them for several requests."
            raise RefusedError(
                Failure(429, message, "rate_limit_error", "too_many_connections", headers=RETRY | _CLOSE)
            )
        return identity


class _Exchange:
    """One request and its answer. Adds the headers that all answers carry."""

    def __init__(self, scope: Scope, send: Send, shape: ErrorShape | None, hopped: str) -> None:
        """shape: of errors; None for OpenAI's. hopped: its id at the server that has passed it on; empty for none."""
        self.id = hopped or new_request_id()
        self.extra: Headers = _echoed(scope)
        self._scope = scope
        self._shape = shape
        self.status: int | None = None
        self._send = send
        self._began = time.monotonic()
        scope.setdefault("state", {})["request_id"] = self.id
        scope["state"]["began"] = self._began
        scope["state"]["hopped"] = hopped
        request_id.set(self.id)

    async def refuse(self, failure: Failure, receive: Receive) -> None:
        await failure.response(self._shape)(self._scope, receive, self.send)

    def ms(self) -> float:
        return (time.monotonic() - self._began) * 1000

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = [(b"x-request-id", self.id.encode()), (b"openai-processing-ms", b"%.0f" % self.ms())]
            if self._shape is not None and self._shape.id_header:
                own.append((self._shape.id_header, self.id.encode()))
            if affinity := self._scope["state"].get("affinity", "").encode():
                cookie = b"paceline-affinity=" + affinity + b"; Path=/; HttpOnly; SameSite=Lax"
                own += [(b"paceline-affinity", affinity), (b"set-cookie", cookie)]
            said = list(message.get("headers", ()))
            private = [header for header in PRIVATE if header[0] not in {name.lower() for name, _ in said}]
            message = {**message, "headers": [*said, *private, *own, *self.extra]}
        await self._send(message)


def _presented(headers: Mapping[bytes, bytes]) -> str | None:
    """The key as `Authorization` has it. Anthropic's clients send it alone, as `x-api-key`."""
    alone = headers.get(b"x-api-key")
    if alone is not None and b"authorization" not in headers:
        return f"Bearer {alone.decode('latin-1')}"
    return _text(headers.get(b"authorization"))


def _echoed(scope: Scope) -> Headers:
    """The client's own name of its request, sent back with every answer; one that is no printable ASCII is not."""
    named = next((value for name, value in scope["headers"] if name == CLIENT_REQUEST_ID), b"")
    return [(CLIENT_REQUEST_ID, named)] if _CLIENT_REQUEST.fullmatch(named) else []


def _check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Raises RefusedError for a body that is encoded."""
    encoding = _text(headers.get(b"content-encoding")) or "identity"
    if encoding.strip().lower() != "identity":
        message = f"The Content-Encoding {encoding[:64]!r} is not supported: send the body as it is, without it."
        close = {"Accept-Encoding": "identity", **_CLOSE}  # what is left of the body is not read
        raise RefusedError(Failure(415, message, code="unsupported_content_encoding", headers=close))


def _to_origin_form(scope: Scope) -> None:
    """Change a request-target in absolute form, as clients send it to a proxy, to the usual form. The host that it
    names counts, whatever the header `Host` says (RFC 9112, 3.2.2)."""
    absolute = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if absolute is None:
        return
    path = absolute[2] or b"/"
    scope["raw_path"], scope["path"] = path, unquote(path.decode("latin-1"))
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", absolute[1]), *others]


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")
