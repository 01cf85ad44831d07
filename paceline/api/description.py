"""`GET /openapi.json`: the description of this interface, made when it is first asked for."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.errors import encode_json
from paceline.api.routes import Route

PATH = "/openapi.json"


class ApiDescription:
    """The route that serves the description. Open to any key: it says nothing of models or documents."""

    def __init__(self) -> None:
        self._document: bytes | None = None  # JSON

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="GET",
                path=PATH,
                endpoint=self.show,
                summary="Describe this interface, as OpenAPI 3.1.",
                scope=None,
            ),
        )

    async def show(self, request: Request) -> Response:
        if self._document is None:
            self._document = await asyncio.to_thread(_document, request.app)
        return Response(self._document, media_type="application/json")


def _document(app: FastAPI) -> bytes:
    from paceline.api.openapi import describe  # the official client's types take a second to import, at every start

    return encode_json(describe(app))
