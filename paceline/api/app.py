"""The HTTP API as one application, the same on both sides.

Knows `runtime.service.Service`, with the documents in its `library`, and nothing of models or machines. The programs
`register` their own routes with the application. FastAPI's documentation routes are off: they would need no key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.anthropic.endpoint import MessagesEndpoint
from paceline.api.chat.endpoint import ChatEndpoint
from paceline.api.completions import CompletionsEndpoint
from paceline.api.description import ApiDescription
from paceline.api.embeddings import EmbeddingsEndpoint
from paceline.api.generation.attachments import Attachments
from paceline.api.generation.links import NO_ADDRESSES, Addresses
from paceline.api.generation.streaming import LONGEST_S
from paceline.api.http.admission import MAX_ACTIVE, AdmissionControl, AdmissionMiddleware
from paceline.api.http.auth import Keyring
from paceline.api.http.doors import DoorLimits
from paceline.api.http.errors import http_failure
from paceline.api.http.sse import KEEP_ALIVE_S
from paceline.api.metrics import Metrics
from paceline.api.models import Catalog
from paceline.api.observation import Observer
from paceline.api.ollama.endpoint import OllamaEmbedding, OllamaGeneration, OllamaListing
from paceline.api.page.endpoint import Page
from paceline.api.passages import Passages
from paceline.api.rerank import RerankEndpoint
from paceline.api.responses.conversations import ConversationsEndpoint
from paceline.api.responses.endpoint import ResponsesEndpoint
from paceline.api.responses.log import DEFAULT_RETENTION, EventLog, Retention
from paceline.api.routes import allowed, register
from paceline.api.status import Status
from paceline.api.tokens import TokensEndpoint
from paceline.api.vector_stores.endpoint import VectorStoresEndpoint
from paceline.api.vector_stores.files import FilesEndpoint
from paceline.runtime.service import Service
from paceline.runtime.tracing import Tracer
from paceline.sealing import PLAIN, Seal


def create_app(
    service: Service,
    *,
    keyring: Keyring,
    documents: int = 2,
    state: Path | None = None,
    retention: Retention = DEFAULT_RETENTION,
    keep_alive: float = KEEP_ALIVE_S,
    max_active: int = MAX_ACTIVE,
    limits: DoorLimits | None = None,
    seal: Seal = PLAIN,
    tracer: Tracer | None = None,
    addresses: Addresses = NO_ADDRESSES,
    longest_silent: float = LONGEST_S,
) -> FastAPI:
    """Make the application. Raises ConfigError when the folder `state` cannot be used.

    `keyring`: the keys that are let in; without any key, all requests are (see `http.auth.check_exposure`).
    `documents`: passages per side where the request sets none. `keep_alive`: s of silence before a comment is sent.
    `state`: the folder that stores responses; None: in memory. `retention`: limits on stored responses.
    `max_active`: POSTs at a time. `limits`: on strangers. `seal`: of stored responses. `tracer`: of answers.
    `addresses`: under which cited passages are shown. `longest_silent`: s that an answer in one piece may take, 0: any.
    `app.state` holds `admission`, the `observer` of answers, the `attachments` of messages, the table `routes`, and
    `closers`, which are awaited when the server ends.
    """
    admission = AdmissionControl(keyring, max_active, limits)
    app = FastAPI(
        title="Paceline", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.admission = admission
    app.state.routes = []
    app.state.longest_silent = longest_silent or math.inf
    app.state.attachments = Attachments(service)
    app.state.closers = [app.state.attachments.close]
    app.state.observer = Observer(lambda: service.models()[0].name, tracer)
    app.add_middleware(AdmissionMiddleware, admission=admission)
    app.add_exception_handler(HTTPException, _http_error)

    def passages(chunk_ids: Collection[int]) -> Mapping[int, tuple[str, str]]:
        return {} if service.library is None else service.library.passages(chunk_ids)

    event_log = EventLog(state, retention, passages=passages, seal=seal)
    responses = ResponsesEndpoint(
        service, event_log, admission, documents=documents, keep_alive=keep_alive, addresses=addresses
    )
    app.state.closers.append(responses.close)
    for endpoints in (
        ChatEndpoint(service, documents=documents, keep_alive=keep_alive, addresses=addresses),
        MessagesEndpoint(service, documents=documents, keep_alive=keep_alive, addresses=addresses),
        Passages(service),
        responses,
        ConversationsEndpoint(responses.conversations),
        FilesEndpoint(service),
        VectorStoresEndpoint(service),
        CompletionsEndpoint(service, keep_alive=keep_alive),
        EmbeddingsEndpoint(service),
        RerankEndpoint(service),
        TokensEndpoint(service),
        OllamaGeneration(service, documents=documents, keep_alive=keep_alive),
        OllamaEmbedding(service),
        OllamaListing(service),
        Catalog(service, admission),
        Metrics(service, app.state.observer.counts),
        Status(service, admission),
        ApiDescription(),
        Page(),
    ):
        register(app, endpoints.routes())
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """The answer to an unknown path or method."""
    assert isinstance(error, HTTPException), "registered for nothing else"
    allow = allowed(request.app, request.scope) if error.status_code == 405 else None
    failure = http_failure(error.status_code, request.method, request.url.path[:256], allow)
    return failure.response(request.app.state.admission.error_shape(request.scope["path"]))
