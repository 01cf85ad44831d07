"""`/v1/files`: upload, list, describe, download and delete files. A file belongs to the key that uploaded it.

Files are stored only; attaching one to a vector store makes it readable. Source: openai-openapi 2.3.0,
CreateFileRequest and OpenAIFile.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Literal, TypeVar, get_args
from urllib.parse import quote

from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from paceline.api.http.body import Schema, least_bytes, read_upload
from paceline.api.http.pagination import FilesQuery, answer, listing, parse_query
from paceline.api.routes import Route
from paceline.api.vector_stores.search import library_of
from paceline.errors import RequestError
from paceline.rag.store.files import Arrival, StoredFile, missing
from paceline.rag.store.library import Library
from paceline.runtime.service import Service

# Uploads in turns of their owners: many files of one that arrive at once hold up no other's.
#
# In a turn of the event loop one part of one body is handled for each owner whose parts have come, so that an owner's
# share of the loop is that of others however many bodies it sends; its connections wait meanwhile, by flow control.
# And of each owner one upload at a time is brought to the disk, which may take as long as the disk likes, so that
# threads are left for others. Not handled: what several owners take of one disk together.


T = TypeVar("T")


class UploadTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._parts: dict[str, deque[asyncio.Future[None]]] = {}  # that wait, of owners with any
        self._keeping: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of the owners in `_kept`
        self._kept: defaultdict[str, int] = defaultdict(int)  # uploads that are brought to the disk or wait for it

    async def part(self, owner: str) -> None:
        """Wait until one more part of the owner's bodies may be handled."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._parts:
            loop.call_soon(self._next_of_each, loop)
        self._parts.setdefault(owner, deque()).append(turn)
        await turn

    async def keep(self, owner: str, work: Callable[[], T]) -> T:
        """The result of `work`, which blocks on the disk, from a thread."""
        self._kept[owner] += 1
        try:
            async with self._keeping[owner]:
                return await asyncio.to_thread(work)
        finally:
            self._kept[owner] -= 1
            if not self._kept[owner]:
                del self._kept[owner], self._keeping[owner]

    def _next_of_each(self, loop: asyncio.AbstractEventLoop) -> None:
        for owner, waiting in [*self._parts.items()]:
            while waiting and (turn := waiting.popleft()).done():  # cancelled: nobody waits for it any more
                pass
            if not turn.done():
                turn.set_result(None)
            if not waiting:
                del self._parts[owner]
        if self._parts:
            loop.call_soon(self._next_of_each, loop)  # after the parts above, which then have been handled


_PIECE = 1 << 20  # bytes
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


class FileForm(Schema):
    """Form of an upload."""

    file: bytes
    purpose: Annotated[Purpose, Field(description="Kept and shown; every file can be read into a vector store.")]


class FilesEndpoint:
    """The routes and the service they use."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turns = UploadTurns()

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/v1/files",
                endpoint=self.create,
                summary="Upload a file.",
                scope="files",
                form=FileForm,
                response="FileObject",
                refusals=(404, 408, 413),
            ),
            Route(
                method="GET",
                path="/v1/files",
                endpoint=self.list_files,
                summary="List the files of this key.",
                scope="files",
                query=FilesQuery,
                response="SyncCursorPage[FileObject]",
                refusals=(404,),
            ),
            Route(
                method="GET",
                path="/v1/files/{file_id}",
                endpoint=self.show,
                summary="Describe a file.",
                scope="files",
                response="FileObject",
                refusals=(404,),
            ),
            Route(
                method="GET",
                path="/v1/files/{file_id}/content",
                endpoint=self.content,
                summary="Give the bytes of a file back.",
                scope="files",
                media_type="application/octet-stream",
                refusals=(404,),
            ),
            Route(
                method="DELETE",
                path="/v1/files/{file_id}",
                endpoint=self.delete,
                summary="Delete a file, and what vector stores hold of it.",
                scope="files",
                response="FileDeleted",
                refusals=(404,),
            ),
        )

    async def create(self, request: Request) -> Response:
        library = library_of(self._service)
        owner: str = request.state.identity.key
        arrival = await asyncio.to_thread(library.uploads.receive, owner, least_bytes(request))
        try:
            return answer(_object(await self._stored_upload(library, arrival, request)))
        finally:
            await asyncio.to_thread(arrival.close)

    async def _stored_upload(self, library: Library, arrival: Arrival, request: Request) -> StoredFile:
        async with read_upload(request, arrival, partial(self._turns.part, arrival.owner)) as upload:
            purpose = upload.fields.get("purpose")
            if purpose is None:
                raise RequestError("The field purpose is required.", param="purpose")
            if purpose not in PURPOSES:
                raise RequestError(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
            if any(name.partition("[")[0] == "expires_after" for name in upload.fields):
                raise RequestError(
                    "Files stay until they are deleted (in `expires_after`).",
                    code="unsupported_parameter",
                    param="expires_after",
                )
            return await self._turns.keep(arrival.owner, partial(library.uploads.keep, arrival, upload.name, purpose))

    async def list_files(self, request: Request) -> Response:
        query = parse_query(FilesQuery, request.query_params)
        page = library_of(self._service).uploads.page
        files, more = await asyncio.to_thread(page, request.state.identity.key, query.paging, query.purpose)
        return listing([_object(file) for file in files], more)

    async def show(self, request: Request) -> Response:
        return answer(_object(await self._stored(library_of(self._service), request)))

    async def content(self, request: Request) -> Response:
        library = library_of(self._service)
        stored = await self._stored(library, request)
        path = library.uploads.path(stored.id)
        try:
            if path is None:
                return await self._opened(library, stored)
            status = await asyncio.to_thread(path.stat)
        except FileNotFoundError:  # it has just been deleted
            raise missing("file", stored.id) from None
        return FileResponse(
            path,
            stat_result=status,
            media_type="application/octet-stream",
            filename=stored.name,
            headers={"x-content-type-options": "nosniff"},
        )

    @staticmethod
    async def _opened(library: Library, stored: StoredFile) -> Response:
        """The content of an encrypted file, which is checked as a whole before its first byte is sent; given whole,
        whatever range a client asks for."""
        document = await asyncio.to_thread(library.uploads.open, stored.id)

        async def pieces() -> AsyncIterator[bytes]:
            with document:
                while piece := document.read(_PIECE):
                    yield piece

        response = StreamingResponse(pieces(), media_type="application/octet-stream")
        response.headers["content-length"] = str(stored.num_bytes)
        response.headers["content-disposition"] = f"attachment; filename*=utf-8''{quote(stored.name, safe='')}"
        response.headers["x-content-type-options"] = "nosniff"
        return response

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await asyncio.to_thread(library_of(self._service).delete_file, request.state.identity.key, file_id)
        return answer({"id": file_id, "object": "file", "deleted": True})

    @staticmethod
    async def _stored(library: Library, request: Request) -> StoredFile:
        get = library.uploads.get
        return await asyncio.to_thread(get, request.state.identity.key, request.path_params["file_id"])


def _object(file: StoredFile) -> dict[str, object]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": None,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
