"""Records of vector stores, their files and batches, and reading them from rows.

Functions run inside the caller's transaction and raise RequestError (404) for a missing row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS
from paceline.rag.database import Database
from paceline.rag.store.files import missing
from paceline.rag.store.filters import Attributes
from paceline.rag.store.paging import Paging, page
from paceline.sealing.seal import Box, DamagedError

_logger = logging.getLogger("paceline.rag")
_STORE = "seq, id, name, metadata, created_at, active_at"
_ATTACHED = (
    "seq, file, store, created_at, status, error_code, error_message, attributes, chunk_tokens, overlap, usage_bytes"
)

Status = Literal["in_progress", "completed", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of files by status."""

    in_progress: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.in_progress + self.completed + self.cancelled + self.failed


@dataclass(frozen=True, slots=True)
class VectorStore:
    """A vector store with its totals."""

    id: str
    name: str
    metadata: Mapping[str, str]
    created_at: float  # s since 1970
    active_at: float  # last search or change, to within a minute
    counts: Counts
    usage_bytes: int  # of texts and vectors


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file to attach, with its attributes and chunking."""

    file: str
    attributes: Attributes = field(default_factory=dict)
    chunk_tokens: int = CHUNK_TOKENS
    overlap: int = OVERLAP_TOKENS


@dataclass(frozen=True, slots=True)
class VectorStoreFile:
    """A file attached to a vector store."""

    file: str
    store: str
    created_at: float
    status: Status
    error_code: str  # "" unless it failed
    error_message: str
    attributes: Attributes
    chunk_tokens: int
    overlap: int
    usage_bytes: int


@dataclass(frozen=True, slots=True)
class FileBatch:
    """Files attached to a vector store by one request."""

    id: str
    store: str
    created_at: float
    cancelled: bool
    counts: Counts


def check_store(database: Database, owner: str, store_id: str) -> None:
    """Raise RequestError (404) unless the owner has this store."""
    row = database.execute("SELECT 1 FROM vector_stores WHERE owner = ? AND id = ?", owner, store_id).fetchone()
    if row is None:
        raise missing("vector store", store_id)


def read_store(database: Database, owner: str, store_id: str) -> VectorStore:
    check_store(database, owner, store_id)
    row = database.execute(f"SELECT {_STORE} FROM vector_stores WHERE id = ?", store_id).fetchone()
    return _store(database, row[1:])


def read_stores(database: Database, owner: str, paging: Paging) -> tuple[list[VectorStore], bool]:
    """A page of the owner's stores, and whether there are more."""
    rows, more = page(database, f"SELECT {_STORE} FROM vector_stores WHERE owner = ?", [owner], paging)
    return [_store(database, row) for row in rows], more


def read_store_file(database: Database, store_id: str, file_id: str) -> VectorStoreFile:
    row = database.execute(
        f"SELECT {_ATTACHED} FROM attached WHERE store = ? AND file = ?", store_id, file_id
    ).fetchone()
    if row is None:
        raise missing("file in this vector store", file_id)
    return _file(database, row[1:])


def read_store_files(
    database: Database, store_id: str, paging: Paging, *, status: Status | None, batch: str | None
) -> tuple[list[VectorStoreFile], bool]:
    """A page of a store's files, and whether there are more. `status` and `batch` restrict the list; None: do not."""
    source, parameters = f"SELECT {_ATTACHED} FROM attached WHERE store = ?", [store_id]
    for column, value in (("status", status), ("batch", batch)):
        if value is not None:
            source, parameters = f"{source} AND {column} = ?", [*parameters, value]
    rows, more = page(database, source, list(parameters), paging, key="file")
    return [_file(database, row) for row in rows], more


def read_batch(database: Database, store_id: str, batch_id: str) -> FileBatch:
    row = database.execute(
        "SELECT created_at, cancelled FROM file_batches WHERE store = ? AND id = ?", store_id, batch_id
    ).fetchone()
    if row is None:
        raise missing("file batch", batch_id)
    return FileBatch(batch_id, store_id, row[0], bool(row[1]), _counts(database, "batch = ?", batch_id))


def total_usage(database: Database, owner: str, *, excluding: int) -> int:
    """Bytes of texts and vectors in all stores of an owner, without those of one attached file, given by its `seq`."""
    (usage,) = database.execute(
        "SELECT total(usage_bytes) FROM attached JOIN vector_stores ON id = store "
        "WHERE owner = ? AND attached.seq != ?",
        owner,
        excluding,
    ).fetchone()
    return int(usage)


def _store(database: Database, row: Sequence[Any]) -> VectorStore:
    """A record from a row with the columns `_STORE` after the first."""
    store_id, name, metadata, created_at, active_at = row
    box = database.seal.rows
    name, metadata = _opened(box, name, f"name {store_id}"), _opened(box, metadata, f"metadata {store_id}", "{}")
    (usage,) = database.execute("SELECT total(usage_bytes) FROM attached WHERE store = ?", store_id).fetchone()
    counts = _counts(database, "store = ?", store_id)
    return VectorStore(store_id, name, json.loads(metadata), created_at, active_at, counts, int(usage))


def _counts(database: Database, where: str, parameter: str) -> Counts:
    rows = database.execute(f"SELECT status, count(*) FROM attached WHERE {where} GROUP BY status", parameter)
    return Counts(**dict(rows))


def _file(database: Database, row: Sequence[Any]) -> VectorStoreFile:
    """A record from a row with the columns `_ATTACHED` after the first."""
    file, store, created_at, status, code, message, attributes, chunk_tokens, overlap, usage = row
    message = _opened(database.seal.rows, message, f"error {store} {file}")
    parsed = open_attributes(database, store, file, attributes)
    return VectorStoreFile(file, store, created_at, status, code, message, parsed, chunk_tokens, overlap, usage)


# ---- sealed columns -------------------------------------------------------------------------------------------------
def seal_name(database: Database, store_id: str, name: str) -> str | bytes:
    return database.seal.rows.seal_text(name, f"name {store_id}")


def seal_metadata(database: Database, store_id: str, metadata: Mapping[str, str]) -> str | bytes:
    return database.seal.rows.seal_text(json.dumps(dict(metadata)), f"metadata {store_id}")


def seal_attributes(database: Database, store_id: str, file_id: str, attributes: Attributes) -> str | bytes:
    return database.seal.rows.seal_text(json.dumps(attributes), f"attributes {store_id} {file_id}")


def open_attributes(database: Database, store_id: str, file_id: str, attributes: str | bytes) -> Attributes:
    found: Attributes = json.loads(_opened(database.seal.rows, attributes, f"attributes {store_id} {file_id}", "{}"))
    return found


def seal_error(database: Database, store_id: str, file_id: str, message: str) -> str | bytes:
    """ "" stays "": there is no error."""
    return database.seal.rows.seal_text(message, f"error {store_id} {file_id}") if message else ""


def _opened(box: Box, value: str | bytes, place: str, damaged: str = "(damaged)") -> str:
    """A sealed text; `damaged`, with a line in the log, for one that has been changed. "" stays ""."""
    try:
        return box.open_text(value, place) if value else ""
    except DamagedError as error:
        _logger.error("a value of a vector store is damaged on the disk: %s", error)
        return damaged
