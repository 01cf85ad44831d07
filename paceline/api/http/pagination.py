"""Cursor pagination as OpenAI's clients expect it, and small JSON answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from starlette.responses import Response

from paceline.api.http.body import QuerySchema, encode_json
from paceline.errors import RequestError
from paceline.rag.store.files import Paging
from paceline.rag.store.vector_stores import Status

Cursor = Annotated[str, Field(max_length=512)]  # an id, which clients may have given an item


class PageQuery(QuerySchema):
    """Query of a list."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Cursor | None = None
    before: Cursor | None = None

    @property
    def paging(self) -> Paging:
        return Paging(self.limit, self.order, self.after or None, self.before or None)


class FilesQuery(PageQuery):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    purpose: Annotated[str, Field(max_length=64)] | None = None


class AttachedQuery(PageQuery):
    filter: Status | None = None


def page_of(items: Sequence[Mapping[str, object]], asked: PageQuery) -> tuple[list[Mapping[str, object]], bool]:
    """A page of items that are in memory, oldest first, and whether there are more. Raises RequestError (400)."""
    page = list(reversed(items)) if asked.order == "desc" else list(items)
    for name, cursor in (("after", asked.after), ("before", asked.before)):
        if cursor is None:
            continue
        at = next((index for index, item in enumerate(page) if item["id"] == cursor), None)
        if at is None:
            raise RequestError(f"There is no item {cursor!r} in this list.", param=name)
        page = page[at + 1 :] if name == "after" else page[:at]
    return page[: asked.limit], len(page) > asked.limit


def listing(items: Sequence[Mapping[str, object]], more: bool) -> Response:
    ids = [item["id"] for item in items]
    return answer(
        {
            "object": "list",
            "data": list(items),
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": more,
        }
    )


def answer(value: Mapping[str, object], status: int = 200) -> Response:
    return Response(encode_json(value), status_code=status, media_type="application/json")


def deleted(id: str, kind: str) -> Response:
    return answer({"id": id, "object": kind, "deleted": True})
