"""The table of routes: the application, the check of scopes, `openapi.json` and the tests are made from it.

FastAPI is used as a bare router: endpoints take a Request and return a Response, and parsing, errors, scopes and the
OpenAPI document are ours. OpenAI's clients expect its error envelope with the field at fault, nulls that mean absent,
and streams; bodies are read under our limits of size and time, and the document has the official client's shapes.
A route of FastAPI's own that validates the same model added 125 us of a processor to each request: 22 % to what this
HTTP surface takes, 4 % to all of a request of one token to the fake model (bench/LOG.md, 2026-11-24).

To add an endpoint, give its class a method `routes()` that returns `Route`s, and pass them to `register` in
`create_app`, or in a program for a route of its own. Nothing else knows of a path. The models in a `Route` only
describe: validation is the endpoint's work. After any change: `make docs`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.auth import Identity, Scope
from paceline.api.http.errors import ErrorShape, Failure

Endpoint = Callable[[Request], Awaitable[Response]]
Shape = type[BaseModel] | str | None
"""Shape of a body: a model, or the name of a type in the official client's `openai.types`, such as
`"chat.ChatCompletion"`; `"SyncPage[Model]"` and `"SyncCursorPage[FileObject]"` are its lists. None: not described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method on one path."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # as Starlette has it: /v1/files/{file_id}
    endpoint: Endpoint
    summary: str  # a sentence for openapi.json
    scope: Scope | None  # that a key must have; None: any key
    open: bool = False  # needs no key
    described: bool = True  # in openapi.json; a file of the web page is not part of the interface
    request: type[BaseModel] | None = None  # the JSON body
    form: type[BaseModel] | None = None  # the multipart body; a field of bytes is a file
    query: type[BaseModel] | None = None
    response: Shape = None  # of a 200
    media_type: str = "application/json"  # of a 200
    stream: Shape = None  # of one event, where the answer may be a stream
    stream_type: str = "text/event-stream"  # its media type
    errors: ErrorShape | None = None  # None: OpenAI's
    refusals: tuple[int, ...] = ()  # statuses besides those that `openapi` adds for every route of this kind


def register(app: FastAPI, routes: Sequence[Route]) -> None:
    """Serve them, each behind its scope. `app` comes from `create_app`."""
    for route in routes:
        assert not route.open or route.scope is None, "a scope needs a key"
        app.state.routes.append(route)
        if route.errors is not None:
            assert route.path.startswith(route.errors.prefix), "refusals before routing find the shape by the path"
            app.state.admission.error_shapes[route.errors.prefix] = route.errors
        if route.open:
            app.state.admission.open_paths.add(route.path)
        app.router.add_route(route.path, _guarded(route), methods=[route.method])  # GET brings HEAD with it


def _guarded(route: Route) -> Endpoint:
    async def guarded(request: Request) -> Response:
        identity: Identity = request.state.identity
        if not identity.may(route.scope):
            return _insufficient(str(route.scope)).response(route.errors)
        return await route.endpoint(request)

    return guarded


def _insufficient(scope: Scope | str) -> Failure:
    """Missing scope (RFC 6750, 3.1), with OpenAI's message."""
    return Failure(
        403,
        f"You have insufficient permissions for this operation. Missing scopes: {scope}. Use a key that has it: "
        f"`paceline keys create NAME --scope {scope}` at the server makes one.",
        code="insufficient_scope",
        headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
    )
