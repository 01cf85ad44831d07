"""R21: every route of the server, every method and odd spellings of its path, without a key and with wrong ones: 401,
but for a written list."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from lab.openapi import sample
from paceline.api.http.auth import Keyring
from paceline.api.http.routing import routes_of
from paceline.api.page.endpoint import load_assets
from tests.reliability.conftest import Figure
from tests.reliability.real_server import WAIT, RealServer

PAGE = {asset.path for asset in load_assets()}  # files of the web page, which hold nothing of a user
OPEN = {
    "/health",
    "/healthz",
    "/readyz",
    "/v1/devices/enrol",
} | PAGE  # answered without a key, each for a reason (docs)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FROB")
WRONG = (None, "", "Bearer", "Bearer wrong", "Bearer ann wrong", "Basic YW5uOg==", "Bearer ann,bert", "ann")
NEVER = (
    *("/redoc", "/openapi.json", "/admin", "/v1", "/v1/", "/v1/models%00", "/%2e%2e/v1/models"),
    *("/page", "/page/", "/page/x.js", "/page/../v1/models"),
)


def paths(app: FastAPI) -> set[str]:
    """Paths of all routes, with an id where one has a place for it. WebSockets have keys of their own."""
    found = {str(route.path) for route in routes_of(app) if isinstance(route.original_route, Route)}
    assert {str(route.path) for route in routes_of(app)} - found <= {"/v1/link"}
    return {"/".join("x" if part.startswith("{") else part for part in path.split("/")) for path in found}


def spellings(path: str) -> tuple[str, ...]:
    return path, path + "/", path.upper(), "/" + path, path.replace("/v1", "/v1/%2e", 1), path + "?key=ann", path + ";x"


def test_every_route_needs_a_key(hall: RealServer, tmp_path_factory: pytest.TempPathFactory, figure: Figure) -> None:
    with sample(tmp_path_factory.mktemp("sample"), Keyring({})) as (_, app):
        routes = paths(app)
        declared = app.state.admission.open_paths
    assert declared <= OPEN and len(routes) > 20
    tried = 0
    with closing(HTTPConnection(*hall.address, timeout=WAIT)) as http:

        def status(method: str, path: str, header: str | None = None) -> int:
            """Status of a request whose path is sent as it is."""
            nonlocal tried
            tried += 1
            http.request(method, path, b"x", {} if header is None else {"authorization": header})
            with http.getresponse() as answer:
                answer.read()
                return answer.status

        for path in sorted(routes) + list(NEVER):
            for spelling in spellings(path):
                for method in METHODS if spelling == path else ("GET", "POST"):
                    found = status(method, spelling)
                    if spelling.partition("?")[0] in declared:
                        assert found != 401 and found < 500, (method, spelling, found)
                    else:
                        assert found in (400, 401), (method, spelling, found)  # 400: no request of HTTP
        for path in sorted(routes - declared):
            for header in WRONG:
                assert status("POST", path, header) == 401, (path, header)
    hall.check()
    figure("requests without a key", tried)
    figure("routes", len(routes))
