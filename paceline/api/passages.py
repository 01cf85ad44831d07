"""`/v1/passages/{id}`: a cited passage in its document, for whoever could have read it in an answer.

The page `/passage?id=…`, to which citations link, shows it to people. A passage of the documents that this side manages
is shown to every key that may chat; one of a vector store to its owner alone.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path
from pydantic import BaseModel

from paceline.api.http.routing import Caller, ServiceDep
from paceline.api.openapi import keyed_router
from paceline.api.vector_stores.search import library_of
from paceline.errors import RequestError

_MAX_DIGITS = 18  # of an id


class PassageBody(BaseModel):
    """The answer."""

    id: int
    object: str
    document: str
    place: str  # page, heading or lines; empty where it is not known
    text: str
    before: list[str]  # what stands before it in the document, in parts; parts overlap a little
    after: list[str]
    side: str


router = keyed_router("chat", "chat")


@router.get("/v1/passages/{id}")
async def show_passage(number: Annotated[str, Path(alias="id")], service: ServiceDep, caller: Caller) -> PassageBody:
    """Show a cited passage in its document."""
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
        raise RequestError("The id of a passage is a number.", param="id")
    library = library_of(service)
    passage, before, after = await asyncio.to_thread(library.passage, caller.key, int(number))
    return PassageBody(
        id=passage.chunk_id,
        object="paceline.passage",
        document=passage.document,
        place=passage.place,
        text=passage.text.strip(),
        before=list(before),
        after=list(after),
        side=service.side,
    )
