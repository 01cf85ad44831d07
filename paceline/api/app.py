"""The HTTP surface as one application, the same on both sides.

Knows `runtime.service.Service` and nothing of models, threads or links. The programs add their own routes to what
`create_app` returns. The framework's documentation routes are off: they would be open to everybody.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.catalog import Catalog
from paceline.api.chat import ChatEndpoint
from paceline.api.errors import http_failure
from paceline.api.gate import MAX_ACTIVE, OPEN_PATHS, Gate, GateMiddleware
from paceline.api.keys import Keyring
from paceline.api.sse import KEEP_ALIVE_S
from paceline.runtime.service import Service


def create_app(
    service: Service,
    *,
    keys: Mapping[str, str | None],
    documents: int = 2,
    open_paths: frozenset[str] = frozenset(),
    keep_alive: float = KEEP_ALIVE_S,
    max_active: int = MAX_ACTIVE,
) -> FastAPI:
    """`keys`: bearer keys with the device bound to each, none for an open surface; see `keys.check_exposure`.

    `documents`: passages per side unless the request says. `open_paths`: further paths that need no key.
    `keep_alive`: s of silence before a comment is sent. The `Gate` is in `app.state.gate`.
    """
    gate = Gate(Keyring(keys), OPEN_PATHS | open_paths, max_active)
    app = FastAPI(
        title="Paceline", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.gate = gate
    app.add_middleware(GateMiddleware, gate=gate)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _http_error)

    chat = ChatEndpoint(service, documents=documents, keep_alive=keep_alive)
    catalog = Catalog(service, gate)
    for path, method, endpoint in (
        ("/v1/chat/completions", "POST", chat.__call__),
        ("/v1/models", "GET", catalog.list_models),
        ("/v1/models/{name:path}", "GET", catalog.show_model),
        ("/healthz", "GET", catalog.health),
        ("/readyz", "GET", catalog.ready),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router or the framework refuses."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    allow = (error.headers or {}).get("Allow") if isinstance(error, HTTPException) else None
    return http_failure(status, request.method, request.url.path[:256], allow).response()
