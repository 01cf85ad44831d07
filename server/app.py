"""What the server adds to the shared HTTP API: enrolment of devices, and their link."""

from __future__ import annotations

from fastapi import FastAPI

from paceline.api.app import include

from . import enrolment, links
from .devices import Registry
from .links import Links


def add_devices(app: FastAPI, registry: Registry, live: Links) -> FastAPI:
    """The application, made by `create_app`, with the server's own routes."""
    app.state.registry, app.state.signer = registry, live.key
    include(app, enrolment.router)
    app.add_api_websocket_route(links.PATH, live.serve)
    return app
