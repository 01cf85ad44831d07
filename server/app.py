"""What the server adds to the shared HTTP API: enrolment of devices, their link, and other servers' answers."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from paceline.api.app import include
from paceline.api.http.hop import Hops
from paceline.api.http.routing import KEEP_ALIVE_S
from paceline.api.responses.endpoint import LoggedAnswer
from paceline.runtime.identity import PrivateKey

from . import enrolment, links
from .devices import Registry
from .links import Links

if TYPE_CHECKING:
    from paceline.fleet import Fleet


def add_devices(app: FastAPI, registry: Registry, live: Links) -> FastAPI:
    """The application, made by `create_app`, with the server's own routes."""
    app.state.registry, app.state.signer = registry, live.key
    include(app, enrolment.router)
    app.add_api_websocket_route(links.PATH, live.serve)
    return app


def add_hops(app: FastAPI, fleet: Fleet, key: PrivateKey, has: Callable[[str | None], bool]) -> None:
    """Have it pass on what other servers of its fleet are to answer. key: common to all. has: see `Hops`."""

    def follow(response: str, after: int) -> AsyncIterable[Any]:
        return LoggedAnswer(app.state.responses.log, response, KEEP_ALIVE_S, after=after).body_iterator

    app.state.admission.hops = hops = Hops(fleet, key.seed, has, follow)
    app.state.closers.append(hops.close)
