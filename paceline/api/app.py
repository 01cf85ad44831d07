"""The HTTP API as one application, the same on both sides: every router of it is named below.

Knows `runtime.service.Service`, with the documents in its `library`, and nothing of models or machines. The programs
include routers of their own. FastAPI's documentation routes are off: they would need no key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from fastapi import APIRouter, FastAPI

from paceline import __version__
from paceline.api import (
    anthropic,
    completions,
    documents,
    mcp,
    models,
    ollama,
    openapi,
    status,
    texts,
    vector_stores,
)
from paceline.api.chat import output as chat
from paceline.api.generation.attachments import Attachments
from paceline.api.http.admission import AdmissionControl, AdmissionMiddleware, DoorLimits
from paceline.api.http.auth import Keyring
from paceline.api.http.routing import DEFAULTS, HANDLERS, Route, Settings
from paceline.api.observation import Observer
from paceline.api.page import endpoint as page
from paceline.api.responses import conversations
from paceline.api.responses import endpoint as responses
from paceline.api.responses.log import DEFAULT_RETENTION, EventLog, Retention
from paceline.api.responses.runs import Responses
from paceline.runtime.service import Service
from paceline.runtime.tracing import Tracer
from paceline.sealing import PLAIN, Seal
from paceline.sql import Home

ROUTERS = (
    chat.router,  # /v1/chat/completions
    completions.router,  # /v1/completions
    responses.router,  # /v1/responses
    conversations.router,  # /v1/conversations
    vector_stores.files,  # /v1/files
    vector_stores.router,  # /v1/vector_stores
    texts.router,  # /v1/embeddings, /v1/rerank, /v2/rerank
    texts.tokenizing,  # /tokenize, /detokenize
    documents.router,  # /v1/documents, /v1/passages/{id}
    mcp.router,  # /mcp
    documents.policy,  # /v1/policy/check, /v1/policy/confirmations
    anthropic.router,  # /v1/messages
    ollama.answers,  # /api/chat, /api/generate
    ollama.vectors,  # /api/embed, /api/embeddings
    ollama.listing,  # /api/tags, /api/ps, /api/version, /api/show
    models.router,  # /v1/models, /v1/models/{name}
    status.router,  # /metrics, /version
    status.devices,  # /v1/status
    status.probes,  # /healthz, /readyz, /health
    openapi.router,  # /openapi.json
    page.router,  # /, /docs, /passage, /page/*
)
SHAPES = (anthropic.SHAPE, ollama.SHAPE)  # of errors, where they are not OpenAI's


def create_app(
    service: Service,
    settings: Settings = DEFAULTS,
    *,
    keyring: Keyring,
    state: Path | Home | None = None,
    retention: Retention = DEFAULT_RETENTION,
    limits: DoorLimits | None = None,
    seal: Seal = PLAIN,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Make the application. Raises ConfigError when the folder `state` cannot be used.

    `keyring`: the keys that are let in; without any key, all requests are (see `http.auth.check_exposure`).
    `state`: the folder or the database that stores responses; None: in memory. `retention`: limits on stored responses.
    `limits`: on strangers. `seal`: of stored responses. `tracer`: of answers.
    `app.state` holds what `http.routing` hands to endpoints, the `observer` of answers, the `attachments` of messages,
    and `closers`, which are awaited when the server ends.
    """
    admission = AdmissionControl(keyring, limits)
    admission.error_shapes |= {shape.prefix: shape for shape in SHAPES}
    app = FastAPI(
        title="Paceline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers=HANDLERS,
    )
    app.openapi = partial(openapi.describe, app)  # type: ignore[method-assign]  # FastAPI's way to extend it
    app.state.service = service
    app.state.settings = settings
    app.state.admission = admission
    app.state.attachments = Attachments(service)
    app.state.closers = [app.state.attachments.close]
    app.state.observer = Observer(lambda: service.models()[0].name, tracer)
    app.add_middleware(AdmissionMiddleware, admission=admission)
    for router in ROUTERS:
        include(app, router)

    def passages_of(chunk_ids: Collection[int]) -> Mapping[int, tuple[str, str]]:
        return {} if service.library is None else service.library.passages(chunk_ids)

    kept = Responses(EventLog(state, retention, passages=passages_of, seal=seal), admission)
    app.state.responses, app.state.log = kept, kept.log
    app.state.file_turns = vector_stores.FileTurns()
    app.state.closers.append(kept.close)
    return app


def include(app: FastAPI, router: APIRouter) -> None:
    """Serve the routes of a router. `app` comes from `create_app`.

    `include_router` would make every route's validators again for this application, at its first request.
    """
    app.router.routes.extend(router.routes)
    for route in router.routes:
        if isinstance(route, Route) and not route.needs_key:
            app.state.admission.open_paths.add(route.path)
