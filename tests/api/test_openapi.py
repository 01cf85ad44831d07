"""`openapi.json` and the application agree: every route in both, the file not stale, every key checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import WebSocketRoute

from lab import client_shapes
from lab.openapi import sample
from paceline.api.http.auth import SCOPES, Keyring
from paceline.api.http.routing import routes_of
from paceline.api.openapi import OFFICIAL
from paceline.api.page.endpoint import load_assets
from server import links
from server.keys import Keys
from tests.api.declared import declared
from tests.api.generation.test_request import told
from tests.api.scripted import client_of, running

FILE = Path(__file__).parents[2] / "openapi" / "openapi.json"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FastAPI, str, dict[str | None, str]]]:
    """(application, URL, keys by scope) of the whole server. None: of all. `not chat`: of all others."""
    directory = tmp_path_factory.mktemp("server")
    keys = Keys(directory)
    made: dict[str | None, str] = {scope: keys.create(scope, scopes=[scope]) for scope in SCOPES}
    for scope in SCOPES:
        made[f"not {scope}"] = keys.create(f"not {scope}", scopes=[other for other in SCOPES if other != scope])
    made[None] = keys.create("all")
    made["revoked"] = keys.create("revoked")
    keys.revoke("revoked")
    with keys.current() as stored, sample(directory, Keyring({}, stored)) as (node, app), running(app, node) as url:
        yield app, url, made


def test_the_shapes_of_the_official_client_are_those_of_its_release() -> None:
    assert OFFICIAL.read_text(encoding="utf-8") == client_shapes.text(), "make docs"


def test_every_route_is_described_and_every_description_is_a_route(
    served: tuple[FastAPI, str, dict[str | None, str]],
) -> None:
    app, url, keys = served
    with client_of(url, keys[None]) as http:
        document = http.get("/openapi.json").json()
    assert document == json.loads(FILE.read_text(encoding="utf-8")), "make docs"
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.path, route.method) for route in declared(app) if route.is_described}
    others = [each.original_route for each in routes_of(app) if not isinstance(each.original_route, APIRoute)]
    assert [route.path for route in others if isinstance(route, WebSocketRoute)] == [links.PATH]
    assert len(others) == 1, "a WebSocket shows its credential in its handshake; nothing else goes around the doors"
    identities = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(identities)) == len(identities)


def test_every_route_refuses_a_missing_key_a_wrong_one_and_one_without_its_scope(
    served: tuple[FastAPI, str, dict[str | None, str]],
) -> None:
    app, url, keys = served
    routes = declared(app)
    page = {asset.path for asset in load_assets()}
    assert {route.path for route in routes if route.is_open} == page | {
        *("/health", "/healthz", "/readyz", "/v1/devices/enrol")
    }
    for route in routes:
        with client_of(url) as http:
            for header in (None, f"Bearer {keys['revoked']}"):
                headers = {} if header is None else {"authorization": header}
                answer = http.request(route.method, route.concrete, headers=headers)
                if route.is_open:
                    assert answer.status_code in (200, 400), route
                else:
                    assert "API key" in told(answer, route, 401)
            for scope in (None, route.scope or "chat", f"not {route.scope or 'chat'}"):
                answer = http.request(route.method, route.concrete, headers={"authorization": f"Bearer {keys[scope]}"})
                if route.scope is None or scope in (route.scope, None):
                    assert answer.status_code not in (401, 403), (route, scope, answer.text)
                else:
                    assert f"Missing scopes: {route.scope}" in told(answer, route, 403)


def test_every_get_has_a_head(served: tuple[FastAPI, str, dict[str | None, str]]) -> None:
    app, url, keys = served
    with client_of(url, keys[None]) as http:
        for route in declared(app):
            if route.method == "GET":
                head, get = (http.request(method, route.concrete) for method in ("HEAD", "GET"))
                assert head.status_code == get.status_code and head.content == b"", route
                assert head.headers["x-request-id"] != get.headers["x-request-id"]
