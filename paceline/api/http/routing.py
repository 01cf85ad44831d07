"""FastAPI's routes behind keys: the scope is checked, and the body read within its limits, before anything else. Then
what endpoints are given, and addresses of cited passages.

FastAPI reads a body before it solves the dependencies of its route, so that a key without the scope could send one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import Depends, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.params import Security as SecurityParam
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope as AsgiScope

from paceline.api.http.admission import AdmissionControl
from paceline.api.http.auth import Identity
from paceline.api.http.body import MAX_BODY, decode_object, read_body, refusal
from paceline.api.http.errors import failure_of, http_failure, lacks
from paceline.api.http.hop import JOINED, Hops
from paceline.errors import PacelineError
from paceline.runtime.service import Citation, Service
from paceline.settings_tables import ANSWERS, TUNING

_bearer = HTTPBearer(scheme_name="bearer", auto_error=False)
_key = APIKeyHeader(name="x-api-key", scheme_name="key", auto_error=False)


async def key(
    _: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
    __: Annotated[str | None, Security(_key)],
) -> None:
    """Dependency of every router that is not open: `Security(key, scopes=["chat"])`, or without a scope for any key.
    Checks nothing: the middleware has found the key by then, and `Route` looks at its scopes."""


class Route(APIRoute):
    """A route whose body, if it has one, is a JSON object. A sent content type is not looked at: curl's is that of
    forms."""

    needs_key = True
    max_body = MAX_BODY  # bytes

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        doors = [door for door in self.dependencies if isinstance(door, SecurityParam)]
        scopes: list[Any] = [scope for door in doors for scope in door.scopes or ()]
        has_body = self.body_field is not None

        async def handle(request: Request) -> Response:
            identity: Identity = request.state.identity
            for scope in scopes:
                if not identity.may(scope):
                    raise lacks(scope)
            if not has_body:
                return await answer(request)
            body = await self.read(request)
            hops: Hops | None = request.app.state.admission.hops
            if hops is not None and self.path in JOINED and (passed := await hops.by_device(request, body)):
                return passed
            return await answer(_Read(request, body))

        return handle

    async def read(self, request: Request) -> Mapping[str, object]:
        """The body as its models are to see it. Raises RequestError."""
        return decode_object(await read_body(request, self.max_body))


class LargeRoute(Route):
    """A route whose body may have 8 MiB, which are decoded on a thread: many texts come at once."""

    max_body = 8 << 20

    async def read(self, request: Request) -> Mapping[str, object]:
        return await asyncio.to_thread(decode_object, await read_body(request, self.max_body))


class OpenRoute(Route):
    needs_key = False


class _Read(Request):
    def __init__(self, request: Request, value: Mapping[str, object]) -> None:
        others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
        request.scope["headers"] = [*others, (b"content-type", b"application/json")]
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # that there is one is all that is asked for

    async def json(self) -> Mapping[str, object]:
        return self._value


def routes_of(app: FastAPI) -> list[RouteContext]:
    return list(iter_route_contexts(app.routes))


def allowed(app: FastAPI, scope: AsgiScope) -> str:
    """The methods of a path, for the header `Allow`; empty for an unknown path."""
    methods: dict[str, None] = {}
    for route in routes_of(app):
        if route.methods and route.path_regex.match(scope["path"]):
            named = {*route.methods, "HEAD"} if "GET" in route.methods else route.methods
            methods |= dict.fromkeys(sorted(named))
    return ", ".join(methods)


# ---- exceptions -----------------------------------------------------------------------------------------------------
async def report(request: Request, error: Exception) -> Response:
    """The answer to an exception, in the error envelope of the path's API. FastAPI's handler of all of these."""
    match error:
        case RequestValidationError():
            fault = error.errors()[0]
            failure = failure_of(refusal(fault["loc"][1:], fault["type"], fault["msg"]))  # after `body` or `query`
        case HTTPException():  # an unknown path or method
            allow = allowed(request.app, request.scope) if error.status_code == 405 else None
            failure = http_failure(error.status_code, request.method, request.url.path[:256], allow)
        case _:
            failure = failure_of(error)
    return failure.response(request.app.state.admission.error_shape(request.scope["path"]))


HANDLERS: dict[Any, Any] = dict.fromkeys((HTTPException, RequestValidationError, PacelineError), report)


# ---- where a cited passage can be seen ------------------------------------------------------------------------------
# A page of the side that has it shows it to whoever may read it. A device's passage has no address but on the device
# itself: a cloud's client is told only that there is one.
PATH = "/passage"  # of the page


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the two sides, as clients of this one reach them."""

    public: str = ""  # of this side; empty: as each client addresses it
    cloud: str = ""  # of the other side, on a device; empty where its clients are others

    def of(self, request: Request) -> Addresses:
        """The same, as the client behind a request has them."""
        return self if self.public else replace(self, public=str(request.base_url))

    def url(self, citation: Citation) -> str:
        """Address of the cited passage or web page; where it cannot be opened from here, one that only names it."""
        for base, chunk in ((self.public, citation.chunk_id), (self.cloud, citation.peer_chunk)):
            if base and chunk is not None and not citation.url:
                return f"{base.rstrip('/')}{PATH}?id={chunk}"
        return citation.url or f"paceline://{citation.side}/{quote(citation.document, safe='')}"


NO_ADDRESSES: Final = Addresses()


# ---- parameters of endpoints ----------------------------------------------------------------------------------------
# `Annotated[..., Depends(...)]`, in place of globals. They are coroutines: FastAPI runs others on threads.
KEEP_ALIVE_S = 15.0  # a quarter of the 60 s after which nginx gives up on a silent upstream


@dataclass(frozen=True, slots=True)
class Settings:
    """The program's settings that concern answers.

    `documents`: passages per side where the request sets none. `keep_alive`: s of silence before a comment or a space
    is sent. `addresses`: under which cited passages are shown. `longest_silent`: s that an answer in one piece may
    take; 0: any.
    """

    documents: int = ANSWERS.documents
    keep_alive: float = KEEP_ALIVE_S
    addresses: Addresses = NO_ADDRESSES
    longest_silent: float = TUNING.longest_silent_answer


DEFAULTS = Settings()


def of_app(name: str) -> Any:
    """Dependency that finds what `create_app` has put on the application's state under this name."""

    async def found(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(found)


async def _caller(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


ServiceDep = Annotated[Service, of_app("service")]
SettingsDep = Annotated[Settings, of_app("settings")]
AdmissionDep = Annotated[AdmissionControl, of_app("admission")]
Caller = Annotated[Identity, Depends(_caller)]
"""The key behind the request; empty where none is needed."""
