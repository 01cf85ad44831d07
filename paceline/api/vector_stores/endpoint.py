"""`/v1/vector_stores`: collections of uploaded files, to be searched and to be read for answers.

Each side manages its own: at the server all are public (`metadata.zone` is `cloud`), at a device private (`device`).
Validates and converts only; the work is done by the side's `Library`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Literal, TypeVar

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.generation.schema import MAX_METADATA
from paceline.api.http.body import Schema, parse, read_body
from paceline.api.http.errors import decode_object
from paceline.api.http.pagination import AttachedQuery, PageQuery, answer, listing, parse_query
from paceline.api.routes import Endpoint, Route
from paceline.api.vector_stores.search import (
    MAX_QUERIES,
    MAX_QUERY,
    MAX_RESULTS,
    FilterField,
    Key,
    RankingOptions,
    Value,
    filter_of,
    library_of,
    min_score_of,
)
from paceline.errors import RequestError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS
from paceline.rag.store.library import Hit, Library
from paceline.rag.store.vector_stores import Counts, FileBatch, FileSpec, VectorStore, VectorStoreFile
from paceline.runtime.service import Service

# Request bodies of `/v1/vector_stores`, and the JSON objects of its answers.
#
# Source: openai-openapi 2.3.0, CreateVectorStoreRequest, VectorStoreFileObject and their like.


Json = dict[str, object]

MAX_FILES = 500  # in one request
Name = Annotated[str, Field(max_length=256)]
FileId = Annotated[str, Field(min_length=1, max_length=64)]
Metadata = Annotated[dict[Key, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)]
AttributesField = Annotated[dict[Key, Value], Field(max_length=MAX_METADATA)]
Query = Annotated[str, Field(min_length=1, max_length=MAX_QUERY)]


class StaticSizes(Schema):
    """Sizes within OpenAI's bounds. Text beyond the embedder's window is found by its words only."""

    max_chunk_size_tokens: Annotated[int, Field(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Field(ge=0, le=2048)]


class AutoChunking(Schema):
    type: Literal["auto"] = "auto"


class StaticChunking(Schema):
    type: Literal["static"]
    static: StaticSizes


def _branch(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<static>" if kind == "static" else "<auto>"


Chunking = Annotated[
    Annotated[AutoChunking, Tag("<auto>")] | Annotated[StaticChunking, Tag("<static>")], Discriminator(_branch)
]


class StoreFields(Schema):
    name: Name | None = None
    metadata: Metadata | None = None
    expires_after: object = Field(None, description="Refused: a vector store stays until it is deleted.")


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

    file_ids: Annotated[list[FileId], Field(max_length=MAX_FILES)] | None = None
    files: Annotated[list[AttachRequest], Field(max_length=MAX_FILES)] | None = None
    attributes: AttributesField | None = None
    chunking_strategy: Chunking | None = None


class FileRequest(Schema):
    attributes: AttributesField


class SearchRequest(Schema):
    query: Query | Annotated[list[Query], Field(min_length=1, max_length=MAX_QUERIES)]
    max_num_results: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 10
    filters: FilterField | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool = Field(False, description="Accepted; queries are searched for as they are.")


# ---- from requests --------------------------------------------------------------------------------------------------
def attachment(
    file_id: str, attributes: dict[str, str | bool | int | float] | None, chunking: AutoChunking | StaticChunking | None
) -> FileSpec:
    """Raises RequestError (400) for an overlap of more than half a chunk."""
    if not isinstance(chunking, StaticChunking):
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
        "file_counts": counts_object(store.counts),
        "last_active_at": int(store.active_at),
        "expires_after": None,
        "expires_at": None,
        "metadata": dict(store.metadata),
    }


def counts_object(counts: Counts) -> Json:
    return {
        "in_progress": counts.in_progress,
        "completed": counts.completed,
        "cancelled": counts.cancelled,
        "failed": counts.failed,
        "total": counts.total,
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
        "file_counts": counts_object(counts),
    }


def hit_object(hit: Hit) -> Json:
    return {
        "file_id": hit.passage.file_id,
        "filename": hit.passage.document,
        "score": hit.passage.score,
        "attributes": dict(hit.attributes),
        "content": [{"type": "text", "text": hit.passage.titled}],
    }


S = TypeVar("S", bound=Schema)

_STORES = "/v1/vector_stores"
_STORE = f"{_STORES}/{{store_id}}"
_FILE = f"{_STORE}/files/{{file_id}}"
_BATCH = f"{_STORE}/file_batches/{{batch_id}}"
_ELSEWHERE = {
    "cloud": "What a device's store holds is managed at the device: here zone can only be cloud.",
    "device": "What the cloud's store holds is managed at the server: here zone can only be device.",
}


class VectorStoresEndpoint:
    """The routes and the service they use."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> tuple[Route, ...]:
        page, file = "SyncCursorPage[vector_stores.VectorStoreFile]", "vector_stores.VectorStoreFile"
        batch = "vector_stores.VectorStoreFileBatch"
        return (
            _route("POST", _STORES, self.create, "Make a vector store.", "VectorStore", request=StoreRequest),
            _route(
                "GET", _STORES, self.list_stores, "List the vector stores of this key.",
                "SyncCursorPage[VectorStore]", query=PageQuery,
            ),
            _route("GET", _STORE, self.show, "Describe a vector store.", "VectorStore"),
            _route(
                "POST", _STORE, self.modify, "Change a vector store's name or metadata.", "VectorStore",
                request=StoreFields,
            ),
            _route("DELETE", _STORE, self.delete, "Delete a vector store; its files stay.", "VectorStoreDeleted"),
            _route(
                "POST", f"{_STORE}/search", self.search, "Search a vector store.",
                "SyncPage[VectorStoreSearchResponse]", request=SearchRequest,
            ),
            _route(
                "POST", f"{_STORE}/files", self.attach, "Read a file into a vector store.", file,
                request=AttachRequest,
            ),
            _route("GET", f"{_STORE}/files", self.list_files, "List its files.", page, query=AttachedQuery),
            _route("GET", _FILE, self.show_file, "Say what has become of a file.", file),
            _route(
                "POST", _FILE, self.modify_file, "Change a file's attributes in a vector store.", file,
                request=FileRequest,
            ),
            _route(
                "DELETE", _FILE, self.detach, "Take a file out of a vector store.",
                "vector_stores.VectorStoreFileDeleted",
            ),
            _route(
                "GET", f"{_FILE}/content", self.file_content, "Give the text that was read of a file.",
                "SyncPage[vector_stores.FileContentResponse]",
            ),
            _route(
                "POST", f"{_STORE}/file_batches", self.create_batch, "Read several files into a vector store.", batch,
                request=BatchRequest,
            ),
            _route("GET", _BATCH, self.show_batch, "Say what has become of a batch.", batch),
            _route("POST", f"{_BATCH}/cancel", self.cancel_batch, "Read no more files of a batch.", batch),
            _route("GET", f"{_BATCH}/files", self.list_batch_files, "List a batch's files.", page, query=AttachedQuery),
        )  # fmt: skip

    # ---- stores -----------------------------------------------------------------------------------------------------
    async def create(self, request: Request) -> Response:
        library, owner = self._library, _owner(request)
        asked = await _parsed(request, StoreRequest)
        files = [attachment(file_id, None, asked.chunking_strategy) for file_id in asked.file_ids]
        metadata = self._metadata(asked) or {"zone": library.zone}
        return answer(
            store_object(await asyncio.to_thread(library.create_store, owner, asked.name or "", metadata, files))
        )

    async def list_stores(self, request: Request) -> Response:
        query = parse_query(PageQuery, request.query_params)
        stores, more = await asyncio.to_thread(self._library.stores.page, _owner(request), query.paging)
        return listing([store_object(store) for store in stores], more)

    async def show(self, request: Request) -> Response:
        return answer(
            store_object(await asyncio.to_thread(self._library.stores.get, _owner(request), _store_id(request)))
        )

    async def modify(self, request: Request) -> Response:
        asked = await _parsed(request, StoreFields)
        metadata, modify = self._metadata(asked), self._library.stores.modify
        store = await asyncio.to_thread(modify, _owner(request), _store_id(request), name=asked.name, metadata=metadata)
        return answer(store_object(store))

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(self._library.delete_store, _owner(request), _store_id(request))
        return answer({"id": _store_id(request), "object": "vector_store.deleted", "deleted": True})

    async def search(self, request: Request) -> Response:
        asked = await _parsed(request, SearchRequest)
        queries = [asked.query] if isinstance(asked.query, str) else asked.query
        condition, min_score = filter_of(asked.filters), min_score_of(asked.ranking_options)
        hits = await self._service.find(
            partial(
                self._library.search,
                _owner(request),
                [_store_id(request)],
                queries,
                asked.max_num_results,
                condition=condition,
                min_score=min_score,
            )
        )
        return answer(
            {
                "object": "vector_store.search_results.page",
                "search_query": queries,
                "data": [hit_object(hit) for hit in hits],
                "has_more": False,
                "next_page": None,
            }
        )

    # ---- files ------------------------------------------------------------------------------------------------------
    async def attach(self, request: Request) -> Response:
        asked = await _parsed(request, AttachRequest)
        file = attachment(asked.file_id, asked.attributes, asked.chunking_strategy)
        return answer(
            file_object(await asyncio.to_thread(self._library.attach, _owner(request), _store_id(request), file))
        )

    async def list_files(self, request: Request) -> Response:
        return await self._files(request, None)

    async def show_file(self, request: Request) -> Response:
        stores = self._library.stores
        return answer(
            file_object(
                await asyncio.to_thread(stores.attached, _owner(request), _store_id(request), _file_id(request))
            )
        )

    async def modify_file(self, request: Request) -> Response:
        asked = await _parsed(request, FileRequest)
        modify = self._library.stores.modify_file
        file = await asyncio.to_thread(modify, _owner(request), _store_id(request), _file_id(request), asked.attributes)
        return answer(file_object(file))

    async def detach(self, request: Request) -> Response:
        await asyncio.to_thread(self._library.detach, _owner(request), _store_id(request), _file_id(request))
        return answer({"id": _file_id(request), "object": "vector_store.file.deleted", "deleted": True})

    async def file_content(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._library.text, _owner(request), _store_id(request), _file_id(request))
        return answer(
            {
                "object": "vector_store.file_content.page",
                "data": [{"type": "text", "text": text}],
                "has_more": False,
                "next_page": None,
            }
        )

    # ---- batches ----------------------------------------------------------------------------------------------------
    async def create_batch(self, request: Request) -> Response:
        files = attachments(await _parsed(request, BatchRequest))
        return answer(
            batch_object(
                await asyncio.to_thread(self._library.create_batch, _owner(request), _store_id(request), files)
            )
        )

    async def show_batch(self, request: Request) -> Response:
        stores = self._library.stores
        return answer(
            batch_object(await asyncio.to_thread(stores.batch, _owner(request), _store_id(request), _batch_id(request)))
        )

    async def cancel_batch(self, request: Request) -> Response:
        cancel = self._library.stores.cancel_batch
        return answer(
            batch_object(await asyncio.to_thread(cancel, _owner(request), _store_id(request), _batch_id(request)))
        )

    async def list_batch_files(self, request: Request) -> Response:
        return await self._files(request, _batch_id(request))

    # ---- helpers ----------------------------------------------------------------------------------------------------
    @property
    def _library(self) -> Library:
        return library_of(self._service)

    async def _files(self, request: Request, batch: str | None) -> Response:
        query = parse_query(AttachedQuery, request.query_params)
        files, more = await asyncio.to_thread(
            self._library.stores.files,
            _owner(request), _store_id(request), query.paging, status=query.filter, batch=batch,
        )  # fmt: skip
        return listing([file_object(file) for file in files], more)

    def _metadata(self, asked: StoreFields) -> dict[str, str] | None:
        """The metadata with this side's zone; None when the request has none. Raises RequestError (400)."""
        if asked.expires_after is not None:
            raise RequestError(
                "A vector store stays until it is deleted (in `expires_after`).",
                code="unsupported_parameter",
                param="expires_after",
            )
        if asked.metadata is None:
            return None
        zone = self._library.zone
        if asked.metadata.get("zone", zone) != zone:
            raise RequestError(_ELSEWHERE[zone], code="zone_not_here", param="metadata.zone")
        if len(asked.metadata.keys() | {"zone"}) > MAX_METADATA:
            raise RequestError(f"metadata holds {MAX_METADATA} pairs at most, zone among them.", param="metadata")
        return {**asked.metadata, "zone": zone}


def _owner(request: Request) -> str:
    key: str = request.state.identity.key
    return key


def _store_id(request: Request) -> str:
    return str(request.path_params["store_id"])


def _file_id(request: Request) -> str:
    return str(request.path_params["file_id"])


def _batch_id(request: Request) -> str:
    return str(request.path_params["batch_id"])


async def _parsed(request: Request, schema: type[S]) -> S:
    return parse(schema, decode_object(await read_body(request.receive, request.headers.get("content-length"))))


def _route(
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    endpoint: Endpoint,
    summary: str,
    response: str,
    *,
    request: type[Schema] | None = None,
    query: type[Schema] | None = None,
) -> Route:
    return Route(
        method=method,
        path=path,
        endpoint=endpoint,
        summary=summary,
        scope="vector_stores",
        request=request,
        query=query,
        response=response,
        refusals=(404,),
    )
