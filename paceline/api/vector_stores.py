"""`/v1/vector_stores`: collections of uploaded files, to be searched and read for answers; and `/v1/files`.

Each side manages its own stores: at the server all are public (`metadata.zone` is `cloud`), at a device private
(`device`). A file belongs to the key that uploaded it and is stored only; attaching it to a store makes it readable.
Validates and converts; the work is done by the side's `Library`. Source: openai-openapi 2.3.0, CreateFileRequest and
OpenAIFile.
"""

from __future__ import annotations

import asyncio
from asyncio import to_thread
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Literal, Self, get_args
from urllib.parse import quote

from fastapi import Depends, Query
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.api.generation.schema import MAX_METADATA, required, unsupported
from paceline.api.http.body import (
    PIECE,
    AttachedQuery,
    BrokenOffError,
    FilesQuery,
    Json,
    PageQuery,
    Schema,
    Whole,
    answer,
    deleted,
    encode_json,
    least_bytes,
    listing,
    read_upload,
    while_connected,
)
from paceline.api.http.routing import Caller, ServiceDep, of_app
from paceline.api.openapi import answered, form, keyed_router
from paceline.api.search import (
    MAX_QUERIES,
    MAX_QUERY,
    MAX_RESULTS,
    FilterField,
    Key,
    LibraryDep,
    RankingOptions,
    Value,
    filter_of,
    min_score_of,
)
from paceline.errors import RequestError, StorageError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS
from paceline.rag.store.files import Arrival, StoredFile, missing
from paceline.rag.store.library import Hit, Library
from paceline.rag.store.vector_stores import FileBatch, FileSpec, VectorStore, VectorStoreFile
from paceline.runtime.units import Turnstile

# ---- bodies of requests ---------------------------------------------------------------------------------------------
# Source: openai-openapi 2.3.0, CreateVectorStoreRequest, VectorStoreFileObject and their like.

MAX_FILES = 500  # in one request
Name = Annotated[str, Field(max_length=256)]
FileId = Annotated[str, Field(min_length=1, max_length=64)]
Metadata = Annotated[dict[Key, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)]
AttributesField = Annotated[dict[Key, Value], Field(max_length=MAX_METADATA)]
Question = Annotated[str, Field(min_length=1, max_length=MAX_QUERY)]


class StaticSizes(Schema):
    """Sizes within OpenAI's bounds. Text beyond the embedder's window is found by its words only."""

    max_chunk_size_tokens: Annotated[int, Field(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Field(ge=0, le=2048)]


class Chunking(Schema):
    type: Literal["auto", "static"] = "auto"
    static: StaticSizes | None = None

    @model_validator(mode="after")
    def _has_sizes(self) -> Self:
        if self.type == "static" and self.static is None:
            raise required("chunking_strategy.static")
        return self


class StoreFields(Schema):
    name: Name | None = None
    metadata: Metadata | None = None
    expires_after: object = Field(None, description="Refused: a vector store stays until it is deleted.")

    @model_validator(mode="after")
    def _stays(self) -> Self:
        if self.expires_after is not None:
            raise unsupported("expires_after", "A vector store stays until it is deleted")
        return self


class StoreRequest(StoreFields):
    description: Name | None = None
    file_ids: Annotated[list[FileId], Field(max_length=MAX_FILES)] = Field(default_factory=list)
    chunking_strategy: Chunking | None = None


class AttachRequest(Schema):
    file_id: FileId
    attributes: AttributesField | None = None
    chunking_strategy: Chunking | None = None


class BatchRequest(Schema):
    """`file_ids` with fields for all of them, or `files` with fields for each."""

    file_ids: Annotated[list[FileId], Field(min_length=1, max_length=MAX_FILES)] | None = None
    files: Annotated[list[AttachRequest], Field(min_length=1, max_length=MAX_FILES)] | None = None
    attributes: AttributesField | None = None
    chunking_strategy: Chunking | None = None


class FileRequest(Schema):
    attributes: AttributesField


class SearchRequest(Schema):
    query: Question | Annotated[list[Question], Field(min_length=1, max_length=MAX_QUERIES)]
    max_num_results: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 10
    filters: FilterField | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool = Field(False, description="Accepted; queries are searched for as they are.")


# ---- from requests --------------------------------------------------------------------------------------------------
def attachment(
    file_id: str, attributes: dict[str, str | bool | int | float] | None, chunking: Chunking | None
) -> FileSpec:
    """Raises RequestError (400) for an overlap of more than half a chunk."""
    if chunking is None or chunking.static is None or chunking.type == "auto":
        return FileSpec(file_id, attributes or {}, CHUNK_TOKENS, OVERLAP_TOKENS)
    size, overlap = chunking.static.max_chunk_size_tokens, chunking.static.chunk_overlap_tokens
    if 2 * overlap > size:
        raise RequestError(
            "chunk_overlap_tokens must not exceed half of max_chunk_size_tokens.",
            param="chunking_strategy.static.chunk_overlap_tokens",
        )
    return FileSpec(file_id, attributes or {}, size, overlap)


def attachments(asked: BatchRequest) -> list[FileSpec]:
    if (asked.file_ids is None) == (asked.files is None):
        raise RequestError("Give either file_ids or files.", param="file_ids")
    if asked.files is not None:
        return [attachment(file.file_id, file.attributes, file.chunking_strategy) for file in asked.files]
    return [attachment(file_id, asked.attributes, asked.chunking_strategy) for file_id in asked.file_ids or ()]


# ---- to answers -----------------------------------------------------------------------------------------------------
def store_object(store: VectorStore) -> Json:
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": int(store.created_at),
        "name": store.name,
        "status": "in_progress" if store.counts.in_progress else "completed",
        "usage_bytes": store.usage_bytes,
        "file_counts": asdict(store.counts) | {"total": store.counts.total},
        "last_active_at": int(store.active_at),
        "expires_after": None,
        "expires_at": None,
        "metadata": dict(store.metadata),
    }


def file_object(file: VectorStoreFile) -> Json:
    return {
        "id": file.file,
        "object": "vector_store.file",
        "created_at": int(file.created_at),
        "vector_store_id": file.store,
        "status": file.status,
        "usage_bytes": file.usage_bytes,
        "last_error": {"code": file.error_code, "message": file.error_message} if file.error_code else None,
        "attributes": dict(file.attributes),
        "chunking_strategy": {
            "type": "static",
            "static": {"max_chunk_size_tokens": file.chunk_tokens, "chunk_overlap_tokens": file.overlap},
        },
    }


def batch_object(batch: FileBatch) -> Json:
    """A batch is `cancelled` even if some files were read before; `failed` only when all files failed."""
    counts = batch.counts
    if batch.cancelled:
        status = "cancelled"
    elif counts.in_progress:
        status = "in_progress"
    else:
        status = "failed" if counts.failed and counts.failed == counts.total else "completed"
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": int(batch.created_at),
        "vector_store_id": batch.store,
        "status": status,
        "file_counts": asdict(counts) | {"total": counts.total},
    }


def hit_object(hit: Hit) -> Json:
    return {
        "file_id": hit.passage.file_id,
        "filename": hit.passage.document,
        "score": hit.passage.score,
        "attributes": dict(hit.attributes),
        "content": [{"type": "text", "text": hit.passage.titled}],
    }


_ELSEWHERE = {
    "cloud": "What a device's store holds is managed at the device: here zone can only be cloud.",
    "device": "What the cloud's store holds is managed at the server: here zone can only be device.",
}
_STORE = answered("VectorStore")
_FILE = answered("vector_stores.VectorStoreFile")
_FILES = answered("SyncCursorPage[vector_stores.VectorStoreFile]")
_BATCH = answered("vector_stores.VectorStoreFileBatch")

router = keyed_router("vector_stores", "vector_stores", prefix="/v1/vector_stores")


@router.post("", responses=_STORE)
async def create_store(asked: StoreRequest, library: LibraryDep, caller: Caller) -> Response:
    """Make a vector store."""
    files = [attachment(file_id, None, asked.chunking_strategy) for file_id in asked.file_ids]
    metadata = _metadata(asked, library) or {"zone": library.zone}
    store = await to_thread(library.stores.create, caller.key, asked.name or "", metadata, files)
    return answer(store_object(store))


@router.get("", responses=answered("SyncCursorPage[VectorStore]"))
async def list_stores(query: Annotated[PageQuery, Query()], library: LibraryDep, caller: Caller) -> Response:
    """List the vector stores of this key."""
    stores, more = await to_thread(library.stores.page, caller.key, query.paging)
    return listing([store_object(store) for store in stores], more)


@router.get("/{store_id}", responses=_STORE)
async def show_store(store_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Describe a vector store."""
    return answer(store_object(await to_thread(library.stores.get, caller.key, store_id)))


@router.post("/{store_id}", responses=_STORE)
async def modify_store(store_id: str, asked: StoreFields, library: LibraryDep, caller: Caller) -> Response:
    """Change a vector store's name or metadata."""
    metadata = _metadata(asked, library)
    store = await to_thread(library.stores.modify, caller.key, store_id, name=asked.name, metadata=metadata)
    return answer(store_object(store))


@router.delete("/{store_id}", responses=answered("VectorStoreDeleted"))
async def delete_store(store_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Delete a vector store; its files stay."""
    await to_thread(library.stores.delete, caller.key, store_id)
    return deleted(store_id, "vector_store.deleted")


@router.post("/{store_id}/search", responses=answered("SyncPage[VectorStoreSearchResponse]"))
async def search_store(
    store_id: str, asked: SearchRequest, library: LibraryDep, service: ServiceDep, caller: Caller
) -> Response:
    """Search a vector store."""
    queries = [asked.query] if isinstance(asked.query, str) else asked.query
    search = partial(
        library.search,
        caller.key,
        [store_id],
        queries,
        asked.max_num_results,
        condition=filter_of(asked.filters),
        min_score=min_score_of(asked.ranking_options),
    )
    hits = await service.find(search, caller.key)
    return answer(
        {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": [hit_object(hit) for hit in hits],
            "has_more": False,
            "next_page": None,
        }
    )


def _metadata(asked: StoreFields, library: Library) -> dict[str, str] | None:
    """The metadata with this side's zone; None when the request has none. Raises RequestError (400)."""
    if asked.metadata is None:
        return None
    if asked.metadata.get("zone", library.zone) != library.zone:
        raise RequestError(_ELSEWHERE[library.zone], code="zone_not_here", param="metadata.zone")
    if len(asked.metadata.keys() | {"zone"}) > MAX_METADATA:
        raise RequestError(f"metadata holds {MAX_METADATA} pairs at most, zone among them.", param="metadata")
    return {**asked.metadata, "zone": library.zone}


# ---- files ----------------------------------------------------------------------------------------------------------
@router.post("/{store_id}/files", responses=_FILE)
async def attach_file(store_id: str, asked: AttachRequest, library: LibraryDep, caller: Caller) -> Response:
    """Read a file into a vector store."""
    file = attachment(asked.file_id, asked.attributes, asked.chunking_strategy)
    return answer(file_object(await to_thread(library.stores.attach, caller.key, store_id, file)))


@router.get("/{store_id}/files", responses=_FILES)
async def list_attached(
    store_id: str, query: Annotated[AttachedQuery, Query()], library: LibraryDep, caller: Caller
) -> Response:
    """List its files."""
    return await _files(library, caller.key, store_id, query)


async def _files(
    library: Library, owner: str, store_id: str, query: AttachedQuery, batch_id: str | None = None
) -> Response:
    page = library.stores.files
    files, more = await to_thread(page, owner, store_id, query.paging, status=query.filter, batch=batch_id)
    return listing([file_object(file) for file in files], more)


@router.get("/{store_id}/files/{file_id}", responses=_FILE)
async def show_attached(store_id: str, file_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Say what has become of a file."""
    return answer(file_object(await to_thread(library.stores.attached, caller.key, store_id, file_id)))


@router.post("/{store_id}/files/{file_id}", responses=_FILE)
async def modify_file(store_id: str, file_id: str, asked: FileRequest, library: LibraryDep, caller: Caller) -> Response:
    """Change a file's attributes in a vector store."""
    file = await to_thread(library.stores.modify_file, caller.key, store_id, file_id, asked.attributes)
    return answer(file_object(file))


@router.delete("/{store_id}/files/{file_id}", responses=answered("vector_stores.VectorStoreFileDeleted"))
async def detach_file(store_id: str, file_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Take a file out of a vector store."""
    await to_thread(library.stores.detach, caller.key, store_id, file_id)
    return deleted(file_id, "vector_store.file.deleted")


@router.get("/{store_id}/files/{file_id}/content", responses=answered("SyncPage[vector_stores.FileContentResponse]"))
async def show_text(store_id: str, file_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Give the text that was read of a file."""

    def page() -> bytes:  # piece by piece, so that other threads can run in between
        text = library.text(caller.key, store_id, file_id)
        quoted = b"".join(encode_json(text[at : at + PIECE])[1:-1] for at in range(0, len(text), PIECE))
        head = b'{"object":"vector_store.file_content.page","data":[{"type":"text","text":"'
        return head + quoted + b'"}],"has_more":false,"next_page":null}'

    return Whole(await to_thread(page), media_type="application/json")


# ---- batches --------------------------------------------------------------------------------------------------------
@router.post("/{store_id}/file_batches", responses=_BATCH)
async def create_batch(store_id: str, asked: BatchRequest, library: LibraryDep, caller: Caller) -> Response:
    """Read several files into a vector store."""
    return answer(batch_object(await to_thread(library.stores.create_batch, caller.key, store_id, attachments(asked))))


@router.get("/{store_id}/file_batches/{batch_id}", responses=_BATCH)
async def show_batch(store_id: str, batch_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Say what has become of a batch."""
    return answer(batch_object(await to_thread(library.stores.batch, caller.key, store_id, batch_id)))


@router.post("/{store_id}/file_batches/{batch_id}/cancel", responses=_BATCH)
async def cancel_batch(store_id: str, batch_id: str, library: LibraryDep, caller: Caller) -> Response:
    """Read no more files of a batch."""
    return answer(batch_object(await to_thread(library.stores.cancel_batch, caller.key, store_id, batch_id)))


@router.get("/{store_id}/file_batches/{batch_id}/files", responses=_FILES)
async def list_batch_files(
    store_id: str, batch_id: str, query: Annotated[AttachedQuery, Query()], library: LibraryDep, caller: Caller
) -> Response:
    """List a batch's files."""
    return await _files(library, caller.key, store_id, query, batch_id)


# ---- files in turns of their owners: many files of one that come or go at once hold up no other's -------------------
# In a turn of the event loop one part of one body is handled for each owner whose parts have come, so that an owner's
# share of the loop is that of others however many bodies it sends; its connections wait meanwhile, by flow control.
# And of each owner one upload at a time is brought to the disk, which may take as long as the disk likes, so that
# threads are left for others. And the contents of each owner that are in memory while they are sent are a few. Not
# handled: what several owners take of one disk together.
MAX_CONTENTS = 16  # of one owner


class FileTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.parts, self.disk, self.contents = Turnstile(), Turnstile(), Turnstile(most=MAX_CONTENTS)

    async def part(self, owner: str) -> None:
        """Wait until one more part of the owner's bodies may be handled, before the loop does anything else."""
        await self.parts.enter(owner)
        asyncio.get_running_loop().call_soon(self.parts.leave, owner)


_BYTES = "application/octet-stream"
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


class FileForm(Schema):
    """Form of an upload."""

    file: bytes
    purpose: Annotated[Purpose, Field(description="Kept and shown; every file can be read into a vector store.")]


files = keyed_router("files", "files", prefix="/v1/files")


async def _stored(file_id: str, library: LibraryDep, caller: Caller) -> StoredFile:
    return await asyncio.to_thread(library.uploads.get, caller.key, file_id)


Turns = Annotated[FileTurns, of_app("file_turns")]
Stored = Annotated[StoredFile, Depends(_stored)]


@files.post("", responses=answered("FileObject"), openapi_extra=form(FileForm))
async def create_file(request: Request, library: LibraryDep, caller: Caller, turns: Turns) -> Response:
    """Upload a file."""
    arrival = await asyncio.to_thread(library.uploads.receive, caller.key, least_bytes(request))
    try:
        return answer(_object(await _received(library, arrival, request, turns)))
    finally:
        await asyncio.to_thread(arrival.close)


async def _received(library: Library, arrival: Arrival, request: Request, turns: FileTurns) -> StoredFile:
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


@files.get("", responses=answered("SyncCursorPage[FileObject]"))
async def list_files(query: Annotated[FilesQuery, Query()], library: LibraryDep, caller: Caller) -> Response:
    """List the files of this key."""
    files, more = await asyncio.to_thread(library.uploads.page, caller.key, query.paging, query.purpose)
    return listing([_object(file) for file in files], more)


@files.get("/{file_id}", responses=answered("FileObject"))
async def show_file(stored: Stored) -> Response:
    """Describe a file."""
    return answer(_object(stored))


@files.get("/{file_id}/content", response_class=Response, responses={200: {"content": {_BYTES: {}}}})
async def give_content(stored: Stored, library: LibraryDep, caller: Caller, turns: Turns) -> Response:
    """Give the bytes of a file back."""
    path = library.uploads.path(stored.id)
    if path is None:
        return _Content(library, stored, turns.contents.turn(caller.key))
    try:
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


class _Content(Response):
    """The content of an encrypted or shared file, which is read while it is sent; given whole, whatever range a client
    asks for. What is damaged behind its beginning is cut off."""

    def __init__(self, library: Library, stored: StoredFile, turn: AbstractAsyncContextManager[None]) -> None:
        """turn: of its owner, in which its pieces are in memory."""
        headers = {
            "content-length": str(stored.num_bytes),
            "content-disposition": f"attachment; filename*=utf-8''{quote(stored.name, safe='')}",
            "x-content-type-options": "nosniff",
        }
        super().__init__(headers=headers, media_type=_BYTES)
        self._file, self._turn = stored.id, turn
        self._pieces = library.uploads.pieces(stored.id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature  # noqa: ARG002
        await while_connected(receive, self._put(send))

    async def _put(self, send: Send) -> None:
        async with self._turn:
            try:
                piece = await to_thread(next, self._pieces, b"")
            except FileNotFoundError:  # it has just been deleted
                raise missing("file", self._file) from None
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                try:
                    piece = await to_thread(next, self._pieces, b"")
                except (OSError, StorageError) as error:
                    raise BrokenOffError(str(error)) from error
            await send({"type": "http.response.body", "body": b""})


@files.delete("/{file_id}", responses=answered("FileDeleted"))
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
