"""`/v1/vector_stores`: collections of uploaded files, to be searched and to be read for answers.

Each side manages its own: at the server all are public (`metadata.zone` is `cloud`), at a device private (`device`).
Validates and converts only; the work is done by the side's `Library`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.generation.schema import MAX_METADATA
from paceline.api.http.body import read_body
from paceline.api.http.pagination import AttachedQuery, PageQuery, answer, listing, parse_query
from paceline.api.http.strict_json import decode_object
from paceline.api.http.validation import Schema, parse
from paceline.api.routes import Endpoint, Route
from paceline.api.vector_stores.schema import (
    AttachRequest,
    BatchRequest,
    FileRequest,
    SearchRequest,
    StoreFields,
    StoreRequest,
    attachment,
    attachments,
    batch_object,
    file_object,
    hit_object,
    store_object,
)
from paceline.api.vector_stores.search import filter_of, library_of, min_score_of
from paceline.errors import RequestError
from paceline.rag.store.library import Library
from paceline.runtime.service import Service

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
