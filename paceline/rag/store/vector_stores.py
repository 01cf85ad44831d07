"""Vector stores: named collections of one side's documents, made of uploaded files.

Rows only: a file that is to be read into a store is a row `in_progress`, which `ingest` works off. A store belongs to
an owner, and for others there is none of that id. What is removed leaves with all that was made of it, in one
transaction; methods that remove tell by which hashes stored KV is found.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import RequestError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS
from paceline.rag.database import Database, SharedConnection
from paceline.rag.document_kv import text_hash
from paceline.rag.records import DEFAULT_COLLECTION, Selection, titled
from paceline.rag.store.files import missing
from paceline.rag.store.filters import Attributes, AttributesOf, Filter, matches
from paceline.rag.store.paging import Paging, page

MAX_STORES = 1_000  # of one owner
MAX_STORE_FILES = 10_000  # of one store
MAX_OWNED_USAGE = 2**30  # bytes of texts and vectors in one owner's stores together; the vectors are held in memory
_ACTIVE_S = 60.0  # how exact the time of the last use is
_STORE = "seq, id, name, metadata, created_at, active_at"
_ATTACHED = (
    "seq, file, store, created_at, status, error_code, error_message, attributes, chunk_tokens, overlap, usage_bytes"
)

Status = Literal["in_progress", "completed", "cancelled", "failed"]
STATUSES: tuple[Status, ...] = ("in_progress", "completed", "cancelled", "failed")


@dataclass(frozen=True, slots=True)
class Counts:
    """Files by what has become of them."""

    in_progress: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        return self.in_progress + self.completed + self.cancelled + self.failed


@dataclass(frozen=True, slots=True)
class VectorStore:
    id: str
    name: str
    metadata: Mapping[str, str]
    created_at: float  # s since 1970
    active_at: float  # last searched or changed, to a minute
    counts: Counts
    usage_bytes: int  # of texts and vectors


@dataclass(frozen=True, slots=True)
class FileSpec:
    """What is to be attached: a file, and how it is to be read."""

    file: str
    attributes: Attributes = field(default_factory=dict)
    chunk_tokens: int = CHUNK_TOKENS
    overlap: int = OVERLAP_TOKENS


@dataclass(frozen=True, slots=True)
class VectorStoreFile:
    """A file in a store."""

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
    id: str
    store: str
    created_at: float
    cancelled: bool
    counts: Counts


class VectorStores:
    """Safe to use from several threads. Every method raises RequestError (404) for what the owner has not."""

    def __init__(self, rows: SharedConnection) -> None:
        self._rows = rows

    # ---- stores -----------------------------------------------------------------------------------------------------
    def create(self, owner: str, name: str, metadata: Mapping[str, str], files: Sequence[FileSpec]) -> VectorStore:
        store_id, now = f"vs_{secrets.token_hex(16)}", time.time()
        with self._rows.writing() as database:
            (count,) = database.execute("SELECT count(*) FROM vector_stores WHERE owner = ?", owner).fetchone()
            if count >= MAX_STORES:
                raise RequestError(f"There are {MAX_STORES} vector stores: delete some first.", code="limit_exceeded")
            database.execute(
                "INSERT INTO vector_stores (id, owner, name, metadata, created_at, active_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                store_id, owner, name, json.dumps(metadata), now, now,
            )  # fmt: skip
            _attach(database, owner, store_id, files, "", "file_ids")
            return _store(database, owner, store_id)

    def get(self, owner: str, store_id: str) -> VectorStore:
        with self._rows.reading() as database:
            return _store(database, owner, store_id)

    def page(self, owner: str, paging: Paging) -> tuple[list[VectorStore], bool]:
        with self._rows.reading() as database:
            source = f"SELECT {_STORE} FROM vector_stores WHERE owner = ?"
            rows, more = page(database, source, [owner], paging)
            return [_filled(database, row) for row in rows], more

    def modify(
        self, owner: str, store_id: str, *, name: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> VectorStore:
        """None: as it was."""
        with self._rows.writing() as database:
            _check(database, owner, store_id)
            if name is not None:
                database.execute("UPDATE vector_stores SET name = ? WHERE id = ?", name, store_id)
            if metadata is not None:
                database.execute("UPDATE vector_stores SET metadata = ? WHERE id = ?", json.dumps(metadata), store_id)
            _touch(database, store_id)
            return _store(database, owner, store_id)

    def delete(self, owner: str, store_id: str) -> set[str]:
        with self._rows.writing() as database:
            _check(database, owner, store_id)
            texts = remove_documents(database, "collection = ?", store_id)
            database.execute("DELETE FROM vector_stores WHERE id = ?", store_id)
        return texts

    # ---- their files ------------------------------------------------------------------------------------------------
    def attach(self, owner: str, store_id: str, file: FileSpec) -> VectorStoreFile:
        """What has been read of the file before can be found until it has been read anew."""
        with self._rows.writing() as database:
            _check(database, owner, store_id)
            _attach(database, owner, store_id, [file], "", "file_id")
            return _attached(database, store_id, file.file)

    def attached(self, owner: str, store_id: str, file_id: str) -> VectorStoreFile:
        with self._rows.reading() as database:
            _check(database, owner, store_id)
            return _attached(database, store_id, file_id)

    def files(
        self, owner: str, store_id: str, paging: Paging, *, status: Status | None = None, batch: str | None = None
    ) -> tuple[list[VectorStoreFile], bool]:
        source, parameters = f"SELECT {_ATTACHED} FROM attached WHERE store = ?", [store_id]
        for column, value in (("status", status), ("batch", batch)):
            if value is not None:
                source, parameters = f"{source} AND {column} = ?", [*parameters, value]
        with self._rows.reading() as database:
            _check(database, owner, store_id)
            if batch is not None:
                _batch(database, store_id, batch)
            rows, more = page(database, source, list(parameters), paging, key="file")
        return [_record(row) for row in rows], more

    def modify_file(self, owner: str, store_id: str, file_id: str, attributes: Attributes) -> VectorStoreFile:
        with self._rows.writing() as database:
            _check(database, owner, store_id)
            _attached(database, store_id, file_id)
            database.execute(
                "UPDATE attached SET attributes = ? WHERE store = ? AND file = ?",
                json.dumps(attributes), store_id, file_id,
            )  # fmt: skip
            return _attached(database, store_id, file_id)

    def detach(self, owner: str, store_id: str, file_id: str) -> set[str]:
        with self._rows.writing() as database:
            _check(database, owner, store_id)
            _attached(database, store_id, file_id)
            texts = remove_documents(database, "collection = ? AND file = ?", store_id, file_id)
            database.execute("DELETE FROM attached WHERE store = ? AND file = ?", store_id, file_id)
            _touch(database, store_id)
        return texts

    def forget_file(self, owner: str, file_id: str) -> set[str]:
        """The row of a file and all that any store holds of it."""
        with self._rows.writing() as database:
            if database.execute("SELECT 1 FROM files WHERE owner = ? AND id = ?", owner, file_id).fetchone() is None:
                raise missing("file", file_id)
            texts = remove_documents(database, "file = ?", file_id)
            database.execute("DELETE FROM files WHERE id = ?", file_id)
        return texts

    # ---- batches ----------------------------------------------------------------------------------------------------
    def create_batch(self, owner: str, store_id: str, files: Sequence[FileSpec]) -> FileBatch:
        batch_id = f"vsfb_{secrets.token_hex(16)}"
        with self._rows.writing() as database:
            _check(database, owner, store_id)
            database.execute(
                "INSERT INTO file_batches (id, store, created_at, cancelled) VALUES (?, ?, ?, 0)",
                batch_id, store_id, time.time(),
            )  # fmt: skip
            _attach(database, owner, store_id, files, batch_id, "file_ids")
            return _batch(database, store_id, batch_id)

    def batch(self, owner: str, store_id: str, batch_id: str) -> FileBatch:
        with self._rows.reading() as database:
            _check(database, owner, store_id)
            return _batch(database, store_id, batch_id)

    def cancel_batch(self, owner: str, store_id: str, batch_id: str) -> FileBatch:
        """What has been read stays; what has not is cancelled."""
        with self._rows.writing() as database:
            _check(database, owner, store_id)
            if _batch(database, store_id, batch_id).counts.in_progress:
                database.execute("UPDATE file_batches SET cancelled = 1 WHERE id = ?", batch_id)
            database.execute(
                "UPDATE attached SET status = 'cancelled' WHERE batch = ? AND status = 'in_progress'", batch_id
            )
            return _batch(database, store_id, batch_id)

    # ---- searching --------------------------------------------------------------------------------------------------
    def selection(
        self, owner: str, store_ids: Sequence[str], condition: Filter | None = None
    ) -> tuple[Selection, AttributesOf]:
        """What is searched for these stores, and the attributes of the files there.

        `default` among the ids names what the side's owner manages. Files there have no attributes.
        """
        ids = tuple(dict.fromkeys(store_ids))
        with self._rows.reading() as database:
            now = time.time()
            for store_id in ids:
                if store_id != DEFAULT_COLLECTION:
                    _check(database, owner, store_id)
            marks = ", ".join("?" * len(ids))
            rows = database.execute(
                "SELECT documents.id, collection, documents.file, attributes FROM documents "
                f"LEFT JOIN attached ON store = collection AND attached.file = documents.file "
                f"WHERE collection IN ({marks})",
                *ids,
            ).fetchall()
            stale = [
                row[0]
                for row in database.execute(
                    f"SELECT id FROM vector_stores WHERE id IN ({marks}) AND active_at < ?", *ids, now - _ACTIVE_S
                )
            ]
        known = {(store, file): json.loads(attributes or "{}") for _, store, file, attributes in rows}
        among = None
        if condition is not None:
            among = frozenset(row[0] for row in rows if matches(condition, known[row[1], row[2]]))
        if stale:
            with self._rows.writing() as database:
                for store_id in stale:
                    _touch(database, store_id)
        return Selection(ids, among), lambda store, file: known.get((store, file), {})


def usage_of(database: Database, owner: str, *, besides: int) -> int:
    """Bytes of texts and vectors in all stores of an owner, without those of one attached file, by its row."""
    (usage,) = database.execute(
        "SELECT total(usage_bytes) FROM attached JOIN vector_stores ON id = store "
        "WHERE owner = ? AND attached.seq != ?",
        owner,
        besides,
    ).fetchone()
    return int(usage)


def remove_documents(database: Database, where: str, *parameters: object) -> set[str]:
    """Remove documents inside the caller's transaction. Returns the hashes of their chunks' texts."""
    rows = database.execute(
        f"SELECT title, text FROM chunks JOIN documents ON documents.id = document WHERE {where}", *parameters
    )
    texts = {text_hash(titled(title, text)) for title, text in rows}
    if database.execute(f"DELETE FROM documents WHERE {where}", *parameters).rowcount:
        database.bump()
    return texts


def _check(database: Database, owner: str, store_id: str) -> None:
    row = database.execute("SELECT 1 FROM vector_stores WHERE owner = ? AND id = ?", owner, store_id).fetchone()
    if row is None:
        raise missing("vector store", store_id)


def _touch(database: Database, store_id: str) -> None:
    database.execute("UPDATE vector_stores SET active_at = ? WHERE id = ?", time.time(), store_id)


def _store(database: Database, owner: str, store_id: str) -> VectorStore:
    _check(database, owner, store_id)
    row = database.execute(f"SELECT {_STORE} FROM vector_stores WHERE id = ?", store_id).fetchone()
    return _filled(database, row[1:])


def _filled(database: Database, row: Sequence[Any]) -> VectorStore:
    store_id, name, metadata, created_at, active_at = row
    (usage,) = database.execute("SELECT total(usage_bytes) FROM attached WHERE store = ?", store_id).fetchone()
    counts = _counts(database, "store = ?", store_id)
    return VectorStore(store_id, name, json.loads(metadata), created_at, active_at, counts, int(usage))


def _counts(database: Database, where: str, parameter: str) -> Counts:
    rows = database.execute(f"SELECT status, count(*) FROM attached WHERE {where} GROUP BY status", parameter)
    return Counts(**dict(rows))


def _batch(database: Database, store_id: str, batch_id: str) -> FileBatch:
    row = database.execute(
        "SELECT created_at, cancelled FROM file_batches WHERE store = ? AND id = ?", store_id, batch_id
    ).fetchone()
    if row is None:
        raise missing("file batch", batch_id)
    return FileBatch(batch_id, store_id, row[0], bool(row[1]), _counts(database, "batch = ?", batch_id))


def _attached(database: Database, store_id: str, file_id: str) -> VectorStoreFile:
    row = database.execute(
        f"SELECT {_ATTACHED} FROM attached WHERE store = ? AND file = ?", store_id, file_id
    ).fetchone()
    if row is None:
        raise missing("file in this vector store", file_id)
    return _record(row[1:])


def _record(row: Sequence[Any]) -> VectorStoreFile:
    file, store, created_at, status, code, message, attributes, chunk_tokens, overlap, usage = row
    read = json.loads(attributes)
    return VectorStoreFile(file, store, created_at, status, code, message, read, chunk_tokens, overlap, usage)


def _attach(database: Database, owner: str, store_id: str, files: Sequence[FileSpec], batch: str, param: str) -> None:
    for file in files:
        row = database.execute("SELECT 1 FROM files WHERE owner = ? AND id = ?", owner, file.file).fetchone()
        if row is None:
            raise RequestError(f"No such file: {file.file[:64]}.", status=404, code="not_found", param=param)
        database.execute(
            "INSERT OR REPLACE INTO attached (store, file, batch, created_at, status, error_code, error_message, "
            "attributes, chunk_tokens, overlap, usage_bytes) VALUES (?, ?, ?, ?, 'in_progress', '', '', ?, ?, ?, "
            "coalesce((SELECT usage_bytes FROM attached WHERE store = ? AND file = ?), 0))",  # of the reading of before
            store_id, file.file, batch, time.time(), json.dumps(file.attributes), file.chunk_tokens, file.overlap,
            store_id, file.file,
        )  # fmt: skip
    (count,) = database.execute("SELECT count(*) FROM attached WHERE store = ?", store_id).fetchone()
    if count > MAX_STORE_FILES:
        raise RequestError(f"A vector store holds {MAX_STORE_FILES} files at most.", code="limit_exceeded", param=param)
    _touch(database, store_id)
