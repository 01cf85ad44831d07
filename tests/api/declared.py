"""What the application's routes declare, for tests that ask each of them."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.params import Security
from fastapi.routing import APIRoute

from paceline.api.http.errors import ErrorShape
from paceline.api.http.routing import Route, routes_of


@dataclass(frozen=True)
class Declared:
    """One method on one path."""

    method: str
    path: str  # as OpenAPI has it
    scope: str | None
    is_open: bool
    is_described: bool
    has_body: bool  # of JSON
    errors: ErrorShape | None  # None: OpenAI's

    @property
    def concrete(self) -> str:
        """The path of some resource."""
        return self.path.replace("{", "").replace("}", "")


def declared(app: FastAPI) -> list[Declared]:
    """Every route but the WebSocket, which shows its credential in its handshake."""
    found = []
    for route in routes_of(app):
        original = route.original_route
        if not isinstance(original, APIRoute):
            continue
        assert isinstance(original, Route) and route.path_format is not None, "every route is behind the same doors"
        scopes = [each for one in original.dependencies if isinstance(one, Security) for each in one.scopes or ()]
        assert original.needs_key == any(isinstance(one, Security) for one in original.dependencies), route.path
        found += [
            Declared(
                method,
                route.path_format,
                next(iter(scopes), None),
                not original.needs_key,
                original.include_in_schema,
                original.body_field is not None,
                app.state.admission.error_shape(route.path_format),
            )
            for method in sorted(original.methods or ())
        ]
    return found
