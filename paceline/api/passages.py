"""`/v1/passages/{id}`: a cited passage in its document, for whoever could have read it in an answer.

The page `/passage?id=…`, to which citations link, shows it to people. A passage of the documents that this side manages
is shown to every key that may chat; one of a vector store to its owner alone.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.body import Schema
from paceline.api.http.errors import encode_json
from paceline.api.routes import Route
from paceline.api.vector_stores.search import library_of
from paceline.errors import RequestError
from paceline.runtime.service import Service

_MAX_DIGITS = 18  # of an id


class PassageBody(Schema):
    """The answer."""

    id: int
    object: str
    document: str
    place: str  # page, heading or lines; empty where it is not known
    text: str
    before: list[str]  # what stands before it in the document, in parts; parts overlap a little
    after: list[str]
    side: str


class Passages:
    """The route and the service it uses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="GET",
                path="/v1/passages/{id}",
                endpoint=self.show,
                summary="Show a cited passage in its document.",
                scope="chat",
                response=PassageBody,
                refusals=(400, 404),
            ),
        )

    async def show(self, request: Request) -> Response:
        number = request.path_params["id"]
        if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
            raise RequestError("The id of a passage is a number.", param="id")
        library = library_of(self._service)
        passage, before, after = await asyncio.to_thread(library.passage, request.state.identity.key, int(number))
        shown = PassageBody(
            id=passage.chunk_id,
            object="paceline.passage",
            document=passage.document,
            place=passage.place,
            text=passage.text.strip(),
            before=list(before),
            after=list(after),
            side=self._service.side,
        )
        return Response(encode_json(shown.model_dump()), media_type="application/json")
