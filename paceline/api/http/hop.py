"""One hop between servers of one database: a request that another of them is to answer is passed on to it.

The answer comes back piece by piece, as fast as the client reads it. A passed request says by whom it came: a code
under a key that all these servers have, so that it is passed on once at most, and keeps its id. The client's own key
goes along, and the other server judges it. Where that server cannot be reached, the request is answered here; where it
ends in the middle of an answer, a stream says so, and one of `/v1/responses` goes on from the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.http.body import BrokenOffError, encode_json, while_connected
from paceline.api.http.errors import Failure, failure_of
from paceline.errors import RequestError, StorageError

if TYPE_CHECKING:
    from paceline.api.http.auth import Identity
    from paceline.fleet import Fleet


def chosen(servers: Collection[str], owner: str, conversation: str) -> str:
    """The server of a conversation, the same at each server, and another for few when a server comes or goes: the one
    with the highest score (Thaler and Ravishankar, rendezvous hashing, 1998). servers: at least one."""

    def score(server: str) -> bytes:
        return hashlib.sha256("\0".join((server, owner, conversation)).encode("utf-8", "surrogatepass")).digest()

    return max(servers, key=score)


HEADER: Final = b"paceline-hop"
AFFINITY: Final = "paceline-affinity"
JOINED: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"}
)
"""Paths whose answers a device may join."""
CONNECT_S: Final = 2.0
SILENT_S: Final = 45.0  # three times as long as a server lets a connection be silent (`routing.KEEP_ALIVE_S`)
FRESH_S: Final = 60.0  # by which the servers' clocks may differ
LOOK_S: Final = 1.0  # between looks whether a server that is waited for is alive
T = TypeVar("T")
Follow = Callable[[str, int], AsyncIterable[Any]]

_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection"}
)
# What speaks of the sender's connection, and what is checked or said at the first server.
_NOT_SENT = _CONNECTION | {b"host", b"content-length", b"expect", b"accept-encoding", b"origin", b"sec-fetch-site"}
_NOT_SENT |= {b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", HEADER}
_NOT_PASSED = _CONNECTION | {b"date", b"server", b"x-request-id", b"request-id", b"openai-processing-ms"}
_NOT_PASSED |= {b"x-client-request-id", b"set-cookie", AFFINITY.encode()}


class Hops:
    """Belongs to the event loop, but for what `Fleet` calls."""

    def __init__(self, fleet: Fleet, secret: bytes, has: Callable[[str | None], bool], follow: Follow) -> None:
        """secret: that all servers have. has: whether a device is linked here; any, where none is named. follow: the
        pieces of a response's stream above a sequence number, from the log."""
        self._fleet = fleet
        self._key = HKDF(SHA256(), 32, None, b"paceline hop").derive(secret)
        self._has = has
        self._follow = follow
        self._urls = {server.id: server.url for server in fleet.servers()}  # of those that are alive
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
            verify=ssl.create_default_context(),
        )
        fleet.each_beat(self._look)

    async def close(self) -> None:
        await self._http.aclose()

    def _look(self) -> None:
        self._urls = {server.id: server.url for server in self._fleet.servers()}

    # ---- who a request comes from -----------------------------------------------------------------------------------
    def came(self, scope: Scope) -> str:
        """The id of a request that another server has passed on; empty for any other."""
        said = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER), "")
        when, _, rest = said.partition(".")
        name, _, code = rest.partition(".")
        path = scope.get("raw_path", b"") + b"?" + scope.get("query_string", b"")
        if not (when.isascii() and when.isdigit() and len(when) < 20 and abs(int(when) - time.time()) < FRESH_S):
            return ""
        right = self._code(f"{when}.{name}", scope["method"], path)
        return name if hmac.compare_digest(code.encode(), right.encode()) else ""

    def _code(self, said: str, method: str, path: bytes) -> str:
        return hmac.digest(self._key, f"{method} {said} ".encode() + path, "sha256").hex()

    # ---- passing on -------------------------------------------------------------------------------------------------
    async def by_device(self, request: Request, body: Mapping[str, object]) -> Response | None:
        """The answer of the server that has the link of the device that belongs to this request; None where it is to be
        answered here."""
        identity: Identity = request.state.identity
        extension = body.get("paceline")
        named = extension.get("device") if isinstance(extension, dict) else None
        device = identity.device or named
        here = urlsplit(self._urls.get(self._fleet.id, "")).netloc
        request.state.affinity = here
        if request.state.hopped or not (isinstance(device, str) or (device is None and not identity.key)):
            return None
        if self._has(device):
            return None
        there = None
        if device is None or _DEVICE.fullmatch(device):
            with suppress(StorageError):  # as if it were linked nowhere
                there = await asyncio.to_thread(self._fleet.where, device)
        if there is not None:
            request.state.affinity = urlsplit(there.url).netloc
            return await self._through(request, there.id, there.url, encode_json(body))
        request.state.affinity = chosen(
            sorted({urlsplit(url).netloc for url in self._urls.values()} or {here}), identity.key, _conversation(body)
        )
        return None

    async def to(self, request: Request, server: str) -> Response | None:
        """The answer of a server; None where this one is to answer."""
        if request.state.hopped or server in ("", self._fleet.id):
            return None
        alive = {each.id: each.url for each in await asyncio.to_thread(self._fleet.servers)}
        return await self._through(request, server, alive[server], b"") if server in alive else None

    async def _through(self, request: Request, server: str, url: str, body: bytes) -> Response | None:
        """None where that server cannot be reached. Raises RequestError where it is lost before it answers."""
        scope = request.scope
        path = scope["raw_path"] + b"?" + scope.get("query_string", b"")
        said = f"{int(time.time())}.{request.state.request_id}"
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT]
        headers += [
            (b"accept-encoding", b"identity"),
            (HEADER, f"{said}.{self._code(said, request.method, path)}".encode()),
        ]
        sent = self._http.build_request(
            request.method, url.rstrip("/") + path.decode("latin-1").removesuffix("?"), headers=headers, content=body
        )
        self._urls.setdefault(server, url)  # it may be newer than the last look

        def is_alive() -> bool:
            return server in self._urls

        try:
            answer = await while_connected(request.receive, _while_alive(self._http.send(sent, stream=True), is_alive))
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return None
        except httpx.TransportError:
            raise lost() from None
        return _Passed(answer, self._follow, is_alive)


def lost() -> RequestError:
    return RequestError(
        "The server to which the device is linked was lost. Please try again.",
        status=503,
        type="server_error",
        code="server_lost",
    )


class _Passed(Response):
    """The answer of another server."""

    def __init__(self, answer: httpx.Response, follow: Follow, is_alive: Callable[[], bool]) -> None:
        super().__init__()
        self._answer = answer
        self._follow = follow
        self._is_alive = is_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        try:
            await while_connected(receive, self._put(scope, send))
        finally:
            await self._answer.aclose()

    async def _put(self, scope: Scope, send: Send) -> None:
        raw = [(name.lower(), value) for name, value in self._answer.headers.raw]
        headers = [each for each in raw if each[0] not in _NOT_PASSED and not each[0].startswith(b"access-control-")]
        await send({"type": "http.response.start", "status": self._answer.status_code, "headers": headers})
        async for piece in self._pieces(scope):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self, scope: Scope) -> AsyncIterator[bytes]:
        """Whole events or lines of a stream, and after them what tells that it was cut; anything of another answer."""
        kind = self._answer.headers.get("content-type", "").partition(";")[0]
        end = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}.get(kind, b"")
        kept, first, last = b"", b"", b""
        try:
            pieces = self._answer.aiter_raw()
            while (piece := await _while_alive(anext(pieces, None), self._is_alive)) is not None:
                whole, between, kept = (kept + piece).rpartition(end) if end else (piece, b"", b"")
                if whole:
                    events = [each for each in whole.split(end) if b"data: " in each] if end else []
                    first, last = (first or events[0], events[-1]) if events else (first, last)
                    yield whole + between
            return
        except httpx.TransportError:
            if not end:
                raise BrokenOffError("the server that wrote it was lost") from None
        failure, shape = failure_of(lost()), scope["app"].state.admission.error_shape(scope["path"])
        if scope["path"] == "/v1/responses":
            async for piece in self._rest(first, last, failure):
                yield piece
        elif kind == "application/x-ndjson":
            yield failure.json(shape) + b"\n"
        else:
            said = b"data: " + failure.json(shape) + b"\n\n"
            yield said + b"data: [DONE]\n\n" if shape is None else b"event: error\n" + said

    async def _rest(self, first: bytes, last: bytes, failure: Failure) -> AsyncIterator[bytes]:
        """The events of a response after those that were passed, by whichever server goes on with it."""
        after = -1 if not last else int(_data(last)["sequence_number"])
        ended = True
        if first and _data(first)["response"]["store"]:
            async for piece in self._follow(_data(first)["response"]["id"], after):
                ended = False
                yield piece
        if ended:
            event = {"type": "error", "code": failure.code, "message": failure.message, "param": None}
            yield b"event: error\ndata: " + encode_json(event | {"sequence_number": after + 1}) + b"\n\n"


async def _while_alive(work: Awaitable[T], is_alive: Callable[[], bool]) -> T:
    """What a server sends. Raises httpx.TransportError once it is no longer alive, though its connection may be: one
    that hangs, or whose machine is gone."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
            if not is_alive():
                raise httpx.ReadTimeout("it has lost its lease")
        return task.result()
    finally:
        task.cancel()


def _data(event: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
    return found


def _conversation(body: Mapping[str, object]) -> str:
    """The part that all requests of a conversation share: its id, or what a user says first."""
    found = next((body[name] for name in ("conversation", "messages", "input", "prompt") if body.get(name)), "")
    if isinstance(found, list):
        users = (each for each in found if isinstance(each, dict) and each.get("role") == "user")
        found = next(users, found[0])
    return json.dumps(found, sort_keys=True)
