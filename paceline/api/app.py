"""The HTTP surface as one application, the same on both sides.

Knows `runtime.service.Service` and nothing of models, threads or links. The programs `register` their own routes with
what `create_app` returns. The framework's documentation routes are off: they would be open to everybody.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.chat.endpoint import ChatEndpoint
from paceline.api.completions.endpoint import CompletionsEndpoint
from paceline.api.embeddings.endpoint import EmbeddingsEndpoint
from paceline.api.http.admission import MAX_ACTIVE, AdmissionControl, AdmissionMiddleware
from paceline.api.http.auth import Keyring
from paceline.api.http.errors import http_failure
from paceline.api.http.sse import KEEP_ALIVE_S
from paceline.api.models import Catalog
from paceline.api.openapi import ApiDescription
from paceline.api.responses.endpoint import ResponsesEndpoint
from paceline.api.responses.event_log import DEFAULT_RETENTION, EventLog, Retention
from paceline.api.responses.replay import close_interrupted
from paceline.api.routes import allowed, register
from paceline.api.vector_stores.endpoint import VectorStoresEndpoint
from paceline.api.vector_stores.files import FilesEndpoint
from paceline.runtime.service import Service


def create_app(
    service: Service,
    *,
    keyring: Keyring,
    documents: int = 2,
    state: Path | None = None,
    retention: Retention = DEFAULT_RETENTION,
    keep_alive: float = KEEP_ALIVE_S,
    max_active: int = MAX_ACTIVE,
) -> FastAPI:
    """`keyring`: who may ask; without any key, everybody; see `keys.check_exposure`.

    `documents`: passages per side unless the request says. `keep_alive`: s of silence before a comment is sent.
    `state`: the folder that keeps responses; None: they are kept in memory. `retention`: how many.
    Raises ConfigError when the folder cannot be used.
    The `Gate` is in `app.state.gate`, every `Route` in `app.state.routes`, what ends with the server in
    `app.state.closers`.
    """
    gate = AdmissionControl(keyring, max_active)
    app = FastAPI(
        title="Paceline", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.gate = gate
    app.state.routes = []
    app.state.closers = []
    app.add_middleware(AdmissionMiddleware, gate=gate)
    app.add_exception_handler(HTTPException, _http_error)
    responses = ResponsesEndpoint(
        service, EventLog(state, close_interrupted, retention), gate, documents=documents, keep_alive=keep_alive
    )
    app.state.closers.append(responses.close)
    for endpoints in (
        ChatEndpoint(service, documents=documents, keep_alive=keep_alive),
        responses,
        FilesEndpoint(service),
        VectorStoresEndpoint(service),
        CompletionsEndpoint(service, keep_alive=keep_alive),
        EmbeddingsEndpoint(service),
        Catalog(service, gate),
        ApiDescription(),
    ):
        register(app, endpoints.routes())
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses."""
    assert isinstance(error, HTTPException), "registered for nothing else"
    allow = allowed(request.app, request.scope) if error.status_code == 405 else None
    return http_failure(error.status_code, request.method, request.url.path[:256], allow).response()
