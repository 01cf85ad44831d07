"""What every request passes before any route: an id, host, origin, key, a place. And every answer after: its headers.

Deny by default: a path needs a key unless its route is open. All this happens before a byte of the body is read.
An exception that no route caught becomes an envelope here. Logs method, path, status and time; never what was said.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.api.http.auth import Identity, Keyring
from paceline.api.http.body import ClientGoneError
from paceline.api.http.cors import Headers, answer_headers, is_local_host, is_local_origin, preflight_headers
from paceline.api.http.errors import RETRY_AFTER_S, Failure, failure_of, unauthorized
from paceline.errors import PacelineError

PROBES = frozenset({"/healthz", "/readyz"})  # asked every few seconds
MAX_ACTIVE = 1280  # POSTs at a time; the service has its own, lower limit on generations

_log = logging.getLogger("paceline.api")


class AdmissionControl:
    """The state of the way in, shared by the middleware, `/readyz` and who shuts down."""

    def __init__(self, keyring: Keyring, max_active: int = MAX_ACTIVE) -> None:
        self.keyring = keyring
        self.open_paths: set[str] = set()  # filled by `routes.register`
        self.max_active = max_active
        self.active = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Failure | None:
        """Take a place, or hear why not."""
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        if self.draining:
            return Failure(503, "This server is shutting down.", "server_error", "shutting_down", headers=retry)
        if self.active >= self.max_active:
            return Failure(429, "Too many requests at once.", "rate_limit_error", "too_many_requests", headers=retry)
        self.active += 1
        self._idle.clear()
        return None

    def stay(self) -> None:
        """Work that goes on after the request which asked for it takes a place of its own, and `leave`s it."""
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def drain(self) -> None:
        """Let nobody in any more, and wait until everybody has left."""
        self.draining = True
        await self._idle.wait()


class AdmissionMiddleware:
    """The ASGI side of `Gate`. Concerns HTTP only: a WebSocket's first message has its credential, keys or not."""

    def __init__(self, app: ASGIApp, gate: AdmissionControl) -> None:
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        asked = f"{scope['method']} {scope.get('raw_path', b'')[:256].decode('latin-1')}"  # still percent-encoded
        try:
            await self._answer(scope, receive, exchange)
        except ClientGoneError:
            _log.info("%s: the client left (%s)", asked, exchange.id)
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("%s failed (%s)", asked, exchange.id)
            if exchange.status is not None:
                raise  # the answer has begun: all that is left is to close the connection
            await failure_of(error).response()(scope, receive, exchange.send)
        if exchange.status is not None:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            _log.log(level, "%s %d %.0f ms %s", asked, exchange.status, exchange.ms(), exchange.id)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if not self.gate.keyring.required:
            foreign = self._foreign(scope["path"], _text(headers.get(b"host")), _text(origin))
            if foreign is not None:
                await foreign.response()(scope, receive, exchange.send)
                return
        if origin is not None:
            exchange.extra += answer_headers(origin)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            private = headers.get(b"access-control-request-private-network") == b"true"
            allowed = preflight_headers(headers.get(b"access-control-request-headers"), private_network=private)
            await exchange.send({"type": "http.response.start", "status": 204, "headers": allowed})
            await exchange.send({"type": "http.response.body", "body": b""})
            return
        identity: Identity | None = Identity()
        if scope["path"] not in self.gate.open_paths:
            identity = self.gate.keyring.identify(_text(headers.get(b"authorization")))
        if identity is None:
            await _refused(b"authorization" in headers).response()(scope, receive, exchange.send)
            return
        scope.setdefault("state", {})["identity"] = identity
        await self._inside(scope, lambda: self.app(scope, receive, exchange.send), receive, exchange)

    def _foreign(self, path: str, host: str | None, origin: str | None) -> Failure | None:
        """Why a server without keys does not listen to who asks. Open routes have any name: what they give, they give
        without a key too, and devices come to them through a proxy."""
        if path not in self.gate.open_paths and not is_local_host(host):
            return Failure(
                403,
                "A server that has no keys answers to localhost and loopback addresses only, and was asked by another "
                "name: make a key, and it answers to any.",
                code="host_not_allowed",
            )
        if origin is not None and not is_local_origin(origin):
            return Failure(
                403,
                "Pages of other machines may not use a server that has no keys: make one, and they may.",
                code="origin_not_allowed",
            )
        return None

    async def _inside(
        self, scope: Scope, work: Callable[[], Awaitable[None]], receive: Receive, exchange: _Exchange
    ) -> None:
        if scope["method"] != "POST":
            await work()
            return
        refusal = self.gate.enter()
        if refusal is not None:
            await refusal.response()(scope, receive, exchange.send)
            return
        try:
            await work()
        finally:
            self.gate.leave()


class _Exchange:
    """One answer on its way out: adds the headers that all of them carry."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = f"req_{secrets.token_hex(16)}"
        self.extra: Headers = []
        self.status: int | None = None
        self._send = send
        self._began = time.monotonic()
        scope.setdefault("state", {})["request_id"] = self.id

    def ms(self) -> float:
        return (time.monotonic() - self._began) * 1000

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = [(b"x-request-id", self.id.encode()), (b"openai-processing-ms", b"%.0f" % self.ms())]
            message = {**message, "headers": [*message.get("headers", []), *own, *self.extra]}
        await self._send(message)


def _refused(presented: bool) -> Failure:
    if presented:
        return unauthorized("Incorrect API key provided.")
    return unauthorized("No API key provided: send it as `Authorization: Bearer KEY`.")


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")
