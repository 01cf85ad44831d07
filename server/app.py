"""The cloud's application: the shared surface with two routes more, enrolment and the link."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI

from paceline.api.app import create_app
from paceline.api.routes import register
from paceline.runtime.service import Service

from . import links
from .devices import Registry
from .enrolment import EnrolEndpoint
from .links import Links


def create_server(
    service: Service,
    registry: Registry,
    live: Links,
    *,
    keys: Mapping[str, str | None],
    documents: int = 2,
) -> FastAPI:
    """`keys`, `documents`: see `create_app`."""
    app = create_app(service, keys=keys, documents=documents)
    register(app, EnrolEndpoint(registry).routes())
    app.add_api_websocket_route(links.PATH, live.serve)
    return app
