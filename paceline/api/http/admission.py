"""Admission of requests before routing (host, origin, key, number of requests), and the headers of every answer.

Deny by default: a path needs a key unless its route is open. All checks precede the first byte of the body. An
exception that no route caught becomes an error envelope here. Logs method, path, status and time; never content.
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

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})  # requested every few seconds, so logged at DEBUG
MAX_ACTIVE = 1280  # POSTs at a time; the service has its own, lower limit on generations

_log = logging.getLogger("paceline.api")


class AdmissionControl:
    """Count of active requests and the state of draining, shared by the middleware, `/readyz` and the shutdown."""

    def __init__(self, keyring: Keyring, max_active: int = MAX_ACTIVE) -> None:
        self.keyring = keyring
        self.open_paths: set[str] = set()  # filled by `routes.register`
        self.max_active = max_active
        self.active = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Failure | None:
        """Admit one request, to be ended by `leave`; or return why it is refused."""
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        if self.draining:
            return Failure(503, "This server is shutting down.", "server_error", "shutting_down", headers=retry)
        if self.active >= self.max_active:
            return Failure(429, "Too many requests at once.", "rate_limit_error", "too_many_requests", headers=retry)
        self.active += 1
        self._idle.clear()
        return None

    def stay(self) -> None:
        """Count background work that outlives its request, until it calls `leave`."""
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse new requests, and wait until the active ones have left."""
        self.draining = True
        await self._idle.wait()


class AdmissionMiddleware:
    """ASGI middleware of `AdmissionControl`. HTTP only: a WebSocket's first message carries its credential, with or
    without keys."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self.app = app
        self.admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        request = f"{scope['method']} {scope.get('raw_path', b'')[:256].decode('latin-1')}"  # still percent-encoded
        try:
            await self._answer(scope, receive, exchange)
        except ClientGoneError:
            _log.info("%s: the client left (%s)", request, exchange.id)
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("%s failed (%s)", request, exchange.id)
            if exchange.status is not None:
                raise  # the answer has begun: all that is left is to close the connection
            await failure_of(error).response()(scope, receive, exchange.send)
        if exchange.status is not None:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            _log.log(level, "%s %d %.0f ms %s", request, exchange.status, exchange.ms(), exchange.id)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if not self.admission.keyring.required:
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
        if scope["path"] not in self.admission.open_paths:
            identity = self.admission.keyring.identify(_text(headers.get(b"authorization")))
        if identity is None:
            await _refused(b"authorization" in headers).response()(scope, receive, exchange.send)
            return
        scope.setdefault("state", {})["identity"] = identity
        await self._admitted(scope, lambda: self.app(scope, receive, exchange.send), receive, exchange)

    def _foreign(self, path: str, host: str | None, origin: str | None) -> Failure | None:
        """Why a server without keys refuses this host or origin. Open routes are served under any host name: they need
        no key anyway, and devices reach them through a proxy."""
        if path not in self.admission.open_paths and not is_local_host(host):
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

    async def _admitted(
        self, scope: Scope, work: Callable[[], Awaitable[None]], receive: Receive, exchange: _Exchange
    ) -> None:
        if scope["method"] != "POST":
            await work()
            return
        refusal = self.admission.enter()
        if refusal is not None:
            await refusal.response()(scope, receive, exchange.send)
            return
        try:
            await work()
        finally:
            self.admission.leave()


class _Exchange:
    """One request and its answer. Adds the headers that all answers carry."""

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
