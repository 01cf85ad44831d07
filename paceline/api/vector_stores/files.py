"""`/v1/files`: upload, list, describe, download and delete files. A file belongs to the key that uploaded it.

Files are stored only; attaching one to a vector store makes it readable. Source: openai-openapi 2.3.0,
CreateFileRequest and OpenAIFile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Literal, get_args
from urllib.parse import quote

from fastapi import Depends, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from paceline.api.generation.schema import required, unsupported
from paceline.api.http.body import Schema, least_bytes, read_upload
from paceline.api.http.pagination import FilesQuery, answer, deleted, listing
from paceline.api.http.routing import Caller, of_app
from paceline.api.openapi import answered, form, keyed_router
from paceline.api.vector_stores.search import LibraryDep
from paceline.errors import RequestError
from paceline.rag.store.files import Arrival, StoredFile, missing
from paceline.rag.store.library import Library
from paceline.runtime.turnstile import Turnstile


# ---- uploads in turns of their owners: many files of one that arrive at once hold up no other's ----------------------
# In a turn of the event loop one part of one body is handled for each owner whose parts have come, so that an owner's
# share of the loop is that of others however many bodies it sends; its connections wait meanwhile, by flow control.
# And of each owner one upload at a time is brought to the disk, which may take as long as the disk likes, so that
# threads are left for others. Not handled: what several owners take of one disk together.
class UploadTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.parts, self.disk = Turnstile(), Turnstile()

    async def part(self, owner: str) -> None:
        """Wait until one more part of the owner's bodies may be handled, before the loop does anything else."""
        await self.parts.enter(owner)
        asyncio.get_running_loop().call_soon(self.parts.leave, owner)


_PIECE = 1 << 20  # bytes
_BYTES = "application/octet-stream"
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


class FileForm(Schema):
    """Form of an upload."""

    file: bytes
    purpose: Annotated[Purpose, Field(description="Kept and shown; every file can be read into a vector store.")]


router = keyed_router("files", "files", prefix="/v1/files")


async def _stored(file_id: str, library: LibraryDep, caller: Caller) -> StoredFile:
    return await asyncio.to_thread(library.uploads.get, caller.key, file_id)


Turns = Annotated[UploadTurns, of_app("upload_turns")]
Stored = Annotated[StoredFile, Depends(_stored)]


@router.post("", responses=answered("FileObject"), openapi_extra=form(FileForm))
async def create_file(request: Request, library: LibraryDep, caller: Caller, turns: Turns) -> Response:
    """Upload a file."""
    arrival = await asyncio.to_thread(library.uploads.receive, caller.key, least_bytes(request))
    try:
        return answer(_object(await _received(library, arrival, request, turns)))
    finally:
        await asyncio.to_thread(arrival.close)


async def _received(library: Library, arrival: Arrival, request: Request, turns: UploadTurns) -> StoredFile:
    async with read_upload(request, arrival, partial(turns.part, arrival.owner)) as upload:
        purpose = upload.fields.get("purpose")
        if purpose is None:
            raise required("purpose")
        if purpose not in PURPOSES:
            raise RequestError(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
        if any(name.partition("[")[0] == "expires_after" for name in upload.fields):
            raise unsupported("expires_after", "Files stay until they are deleted")
        async with turns.disk.turn(arrival.owner):
            return await asyncio.to_thread(library.uploads.keep, arrival, upload.name, purpose)


@router.get("", responses=answered("SyncCursorPage[FileObject]"))
async def list_files(query: Annotated[FilesQuery, Query()], library: LibraryDep, caller: Caller) -> Response:
    """List the files of this key."""
    files, more = await asyncio.to_thread(library.uploads.page, caller.key, query.paging, query.purpose)
    return listing([_object(file) for file in files], more)


@router.get("/{file_id}", responses=answered("FileObject"))
async def show_file(stored: Stored) -> Response:
    """Describe a file."""
    return answer(_object(stored))


@router.get("/{file_id}/content", response_class=Response, responses={200: {"content": {_BYTES: {}}}})
async def give_content(stored: Stored, library: LibraryDep) -> Response:
    """Give the bytes of a file back."""
    path = library.uploads.path(stored.id)
    try:
        if path is None:
            return await _opened(library, stored)
        status = await asyncio.to_thread(path.stat)
    except FileNotFoundError:  # it has just been deleted
        raise missing("file", stored.id) from None
    return FileResponse(
        path,
        stat_result=status,
        media_type=_BYTES,
        filename=stored.name,
        headers={"x-content-type-options": "nosniff"},
    )


async def _opened(library: Library, stored: StoredFile) -> Response:
    """The content of an encrypted or shared file, which is read as a whole before its first byte is sent; given whole,
    whatever range a client asks for."""
    document = await asyncio.to_thread(library.uploads.open, stored.id)

    async def pieces() -> AsyncIterator[bytes]:
        with document:
            while piece := document.read(_PIECE):
                yield piece

    headers = {
        "content-length": str(stored.num_bytes),
        "content-disposition": f"attachment; filename*=utf-8''{quote(stored.name, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(pieces(), media_type=_BYTES, headers=headers)


@router.delete("/{file_id}", responses=answered("FileDeleted"))
async def delete_file(file_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Delete a file, and what vector stores hold of it."""
    await asyncio.to_thread(library.delete_file, caller.key, file_id)
    return deleted(file_id, "file")


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
