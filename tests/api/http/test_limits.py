"""Rules common to all routes: limits on bodies, origins, and headers of every answer."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from lab.openapi import sample
from paceline.api.http.auth import Keyring
from paceline.api.http.body import MAX_BODY, Schema
from paceline.api.http.routing import LargeRoute
from paceline.errors import RequestError
from tests.api.declared import Declared, declared
from tests.api.generation.test_request import told
from tests.api.scripted import client_of, connected, heard, running

ORIGIN = "https://app.example.org"
LONG = ("/embeddings", "/embed", "/rerank")  # ends of paths whose bodies hold many texts
NO_OBJECTS = [
    *(b"", b"null", b"[]", b"42", b'"text"', b"{", b"{'model': 1}", b"\xff\xfe", b"a=1&b=2"),
    *(b'{"model": NaN}', b'{"model": 1e999999}', b'{"model": "\\ud800"}', b'{"seed": ' + b"9" * 5_000 + b"}"),
    b'{"a":' * 60_000 + b"1" + b"}" * 60_000,
    b"[" * 60_000,
    b'{"model": "fake", "messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FastAPI, httpx.Client]]:
    with (
        sample(tmp_path_factory.mktemp("server"), Keyring({"key": None})) as (node, app),
        running(app, node) as url,
        client_of(url, "key") as http,
    ):
        yield app, http


def json_routes(app: FastAPI) -> list[Declared]:
    return [route for route in declared(app) if route.has_body and "{" not in route.path]


def test_no_route_takes_a_body_that_is_not_a_json_object(served: tuple[FastAPI, httpx.Client]) -> None:
    app, http = served
    routes = json_routes(app)
    assert len(routes) >= 5 and "/v1/chat/completions" in [route.path for route in routes]
    for number, route in enumerate(routes):
        for body in NO_OBJECTS if route.path == "/v1/chat/completions" else NO_OBJECTS[number % 3 :: 3]:
            if route.path == "/v1/vector_stores" and not body:
                continue  # a store needs no field at all
            headers = {"content-type": "application/json"}
            assert told(http.request(route.method, route.path, content=body, headers=headers), route)


def test_no_route_takes_a_json_body_beyond_the_limit(served: tuple[FastAPI, httpx.Client]) -> None:
    app, http = served
    for route in json_routes(app):
        most = LargeRoute.max_body if route.path.endswith(LONG) else MAX_BODY
        body = b'{"padding": "' + b"x" * most + b'"}'
        assert "larger than" in told(http.request(route.method, route.path, content=body), route, 413)


@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize", "/api/show", "/v1/vector_stores"])
def test_a_body_without_a_conversation_is_refused_by_its_announced_length(
    served: tuple[FastAPI, httpx.Client], path: str
) -> None:
    """None of it is read: 8 MiB are for files in messages, which these routes do not have."""
    _, http = served
    headers = f"Host: localhost\r\nAuthorization: Bearer key\r\nContent-Length: {MAX_BODY + 1}\r\n"
    with connected(str(http.base_url)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{headers}\r\n".encode())
        answer = connection.recv(65536)
        while b"larger than" not in answer and (more := connection.recv(65536)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 413 ") and f"larger than {MAX_BODY} bytes".encode() in answer


def schemas(base: type[Schema] = Schema) -> Iterator[type[Schema]]:
    for each in base.__subclasses__():
        yield each
        yield from schemas(each)


def test_a_list_is_read_up_to_its_first_fault() -> None:
    """A body of 8 MiB may have millions, each of which takes a kilobyte and microseconds of the loop to be told."""
    found = [(schema, field) for schema in schemas() for field in schema.model_fields]
    assert len(found) > 30
    for schema, field in found:
        for wrong in (1, "x", {}, [], None, {"type": "text"}, {"role": "user", "content": [1] * 200}):
            try:
                schema.model_validate({field: [wrong] * 200})
            except ValidationError as error:
                assert error.error_count() < 50, (schema, field)
            except (RequestError, TypeError):
                pass  # what it says itself


def test_every_answer_of_every_route_has_an_id_a_time_and_its_origin(served: tuple[FastAPI, httpx.Client]) -> None:
    """Includes errors, unknown paths and methods."""
    app, http = served
    asked = [(route.method, route.concrete) for route in declared(app)]
    asked += [("GET", path) for path in ("/nothing/here", "/%ff", "//")]
    asked += [("PATCH", "/v1/models"), ("OPTIONS", "/v1/models")]
    seen = set()
    for method, path in asked:
        answer = http.request(method, path, headers={"origin": ORIGIN})
        assert answer.status_code < 500 or path == "/readyz", (method, path, answer.text)
        assert answer.headers["openai-processing-ms"].isdigit()
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"] and answer.headers["vary"] == "Origin"
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == len(asked)


def test_continue_is_sent_before_the_body_is_received(served: tuple[FastAPI, httpx.Client]) -> None:
    """curl expects it before long bodies."""
    body = b"{}"
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\nexpect: 100-continue\r\n"
    with connected(str(served[1].base_url)) as client:
        client.sendall(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        assert client.recv(64).startswith(b"HTTP/1.1 100 ")
        client.sendall(body)
        answer = heard(client)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"x-request-id" in answer
