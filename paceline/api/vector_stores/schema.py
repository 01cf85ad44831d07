"""Request bodies of `/v1/vector_stores`, and the JSON objects of its answers.

Source: openai-openapi 2.3.0, CreateVectorStoreRequest, VectorStoreFileObject and their like.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from paceline.api.generation.schema import MAX_METADATA
from paceline.api.http.validation import Schema
from paceline.api.vector_stores.search import (
    MAX_QUERIES,
    MAX_QUERY,
    MAX_RESULTS,
    FilterField,
    Key,
    RankingOptions,
    Value,
)
from paceline.errors import RequestError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS
from paceline.rag.store.library import Hit
from paceline.rag.store.vector_stores import Counts, FileBatch, FileSpec, VectorStore, VectorStoreFile

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
