"""The server's application: the shared HTTP API with two more routes, enrolment and the link."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from paceline.api.app import create_app, include
from paceline.api.dependencies import LONGEST_S
from paceline.api.generation.links import NO_ADDRESSES, Addresses
from paceline.api.http.auth import Keyring
from paceline.api.http.doors import DoorLimits
from paceline.api.responses.log import DEFAULT_RETENTION, Retention
from paceline.runtime.service import Service
from paceline.runtime.tracing import Tracer
from paceline.sealing import PLAIN, Seal

from . import enrolment, links
from .devices import Registry
from .links import Links


def create_server(
    service: Service,
    registry: Registry,
    live: Links,
    *,
    keyring: Keyring,
    documents: int = 2,
    state: Path | None = None,
    retention: Retention = DEFAULT_RETENTION,
    limits: DoorLimits | None = None,
    seal: Seal = PLAIN,
    tracer: Tracer | None = None,
    addresses: Addresses = NO_ADDRESSES,
    longest_silent: float = LONGEST_S,
) -> FastAPI:
    """Build the application. The keywords: see `create_app`."""
    app = create_app(
        service,
        keyring=keyring,
        documents=documents,
        state=state,
        retention=retention,
        limits=limits,
        seal=seal,
        tracer=tracer,
        addresses=addresses,
        longest_silent=longest_silent,
    )
    app.state.registry, app.state.signer = registry, live.key
    include(app, enrolment.router)
    app.add_api_websocket_route(links.PATH, live.serve)
    return app
