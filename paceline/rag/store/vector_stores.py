"""Vector stores: named collections of one side's documents, made of uploaded files.

Changes rows only: a file to be read into a store is a row `in_progress`, which `library.Ingester` processes. A store
belongs to an owner; for other owners its id does not exist. Whatever was derived from a removed row is removed in the
same transaction, and erased from the disk before a method returns.
"""

from __future__ import annotations

import json
import logging
import operator
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.core.policy import DocumentFacts
from paceline.errors import RequestError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS
from paceline.rag.database import Database
from paceline.rag.document_kv import DocumentKvStore
from paceline.rag.records import DEFAULT_COLLECTION, Selection
from paceline.rag.rows import all_documents, remove_documents
from paceline.rag.store.files import Paging, missing, ordered_id, page
from paceline.sealing import Box, DamagedError

# Filters over file attributes, as in OpenAI's file search: comparisons, combined by `and` and `or`.
#
# `ne` and `nin` are the negations of `eq` and `in`, so they also hold for a file without the attribute. Values of
# different kinds are unequal and unordered; booleans are not numbers.


Value = str | float | bool
Attributes = Mapping[str, Value]
AttributesOf = Callable[[str, str], Attributes]  # (store, file) → attributes of a file in a searched store


@dataclass(frozen=True, slots=True)
class Comparison:
    """One attribute compared with a constant."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str
    value: Value | tuple[Value, ...]  # a tuple for `in` and `nin` only


@dataclass(frozen=True, slots=True)
class Compound:
    type: Literal["and", "or"]
    filters: tuple[Filter, ...]


Filter = Comparison | Compound


_ORDERS: Mapping[str, Callable[[Any, Any], object]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


def matches(condition: Filter, attributes: Attributes) -> bool:
    if isinstance(condition, Compound):
        combine = all if condition.type == "and" else any
        return combine(matches(part, attributes) for part in condition.filters)
    ours, theirs = attributes.get(condition.key), condition.value
    match condition.type:
        case "eq" | "ne":
            return _equal(ours, theirs) == (condition.type == "eq")
        case "in" | "nin":
            values = theirs if isinstance(theirs, tuple) else (theirs,)
            return any(_equal(ours, value) for value in values) == (condition.type == "in")
        case order:
            return _ordered(ours, theirs) and bool(_ORDERS[order](ours, theirs))


def _equal(ours: object, theirs: object) -> bool:
    return isinstance(ours, bool) == isinstance(theirs, bool) and ours == theirs


def _ordered(ours: object, theirs: object) -> bool:
    """True for two numbers or two texts."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (ours, theirs))
    return numbers or (isinstance(ours, str) and isinstance(theirs, str))


# Records of vector stores, their files and batches, and reading them from rows.
#
# Functions run inside the caller's transaction and raise RequestError (404) for a missing row.


_logger = logging.getLogger("paceline.rag")
_UNREADABLE = "\0"  # in place of a value that is damaged
_PREFIX = "vs_"
_STORE = "seq, id, name, metadata, created_at, active_at"
_ATTACHED = (
    "seq, file, store, created_at, status, error_code, error_message, attributes, chunk_tokens, overlap, usage_bytes"
)

Status = Literal["in_progress", "completed", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Counts:
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


def check_store(database: Database, owner: str, store_id: str) -> None:
    """Raise RequestError (404) unless the owner has this store."""
    row = database.execute("SELECT 1 FROM vector_stores WHERE owner = ? AND id = ?", owner, store_id).fetchone()
    if row is None:
        raise missing("vector store", store_id)


def read_store(database: Database, owner: str, store_id: str) -> VectorStore:
    check_store(database, owner, store_id)
    row = database.execute(f"SELECT {_STORE} FROM vector_stores WHERE id = ?", store_id).fetchone()
    return _store(database, row[1:])


def read_store_file(database: Database, store_id: str, file_id: str) -> VectorStoreFile:
    row = database.execute(
        f"SELECT {_ATTACHED} FROM attached WHERE store = ? AND file = ?", store_id, file_id
    ).fetchone()
    if row is None:
        raise missing("file in this vector store", file_id)
    return _file(database, row[1:])


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
        "SELECT coalesce(sum(usage_bytes), 0) FROM attached JOIN vector_stores ON id = store "
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
    total = "SELECT coalesce(sum(usage_bytes), 0) FROM attached WHERE store = ?"
    (usage,) = database.execute(total, store_id).fetchone()
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


def described(database: Database) -> Iterator[tuple[str, str, str, DocumentFacts | None]]:
    """(id, collection, file, what is known of it) of each document of all stores; None of one that is damaged."""
    stores = {}
    for store_id, name in database.execute("SELECT id, name FROM vector_stores").fetchall():
        opened = _opened(database.seal.rows, name, f"name {store_id}", _UNREADABLE)
        stores[store_id] = None if opened == _UNREADABLE else (opened, store_id)
    tags: dict[tuple[str, str], Attributes | None] = {}
    for store, file, attributes in database.execute("SELECT store, file, attributes FROM attached").fetchall():
        text = _opened(database.seal.rows, attributes, f"attributes {store} {file}", _UNREADABLE)
        tags[store, file] = None if text == _UNREADABLE else json.loads(text or "{}")
    for document, collection, file in all_documents(database):
        names, its_tags = stores.get(collection, ()), tags.get((collection, file), {})
        facts = None
        if document.sha256 and names is not None and its_tags is not None:
            facts = DocumentFacts(tuple(filter(None, (document.source, document.name))), names, its_tags)
        yield document.id, collection, file or document.id, facts


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


MAX_STORES = 1_000  # per owner
MAX_STORE_FILES = 10_000  # per store
MAX_PAST_BATCHES = 1_000  # the latest per store; of older ones, those that have files
MAX_OWNED_USAGE = 2**30  # bytes of texts and vectors in one owner's stores together; the vectors are held in memory
_ACTIVE_S = 60.0  # resolution of the time of last use


class VectorStores:
    """Safe to use from several threads. Every method raises RequestError (404) for what the owner does not have."""

    def __init__(self, database: Database, document_kv: DocumentKvStore, *, attached: Callable[[], None]) -> None:
        """document_kv: stored KV, from which that of removed texts is deleted. attached: called when there are files
        to be read."""
        self._database, self._document_kv, self._attached = database, document_kv, attached

    # ---- stores -----------------------------------------------------------------------------------------------------
    def create(self, owner: str, name: str, metadata: Mapping[str, str], files: Sequence[FileSpec]) -> VectorStore:
        store_id, now = ordered_id(_PREFIX), time.time()
        with self._database.writing() as database:
            (count,) = database.execute("SELECT count(*) FROM vector_stores WHERE owner = ?", owner).fetchone()
            if count >= MAX_STORES:
                raise RequestError(f"There are {MAX_STORES} vector stores: delete some first.", code="limit_exceeded")
            database.execute(
                "INSERT INTO vector_stores (id, owner, name, metadata, created_at, active_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                store_id, owner, seal_name(database, store_id, name), seal_metadata(database, store_id, metadata), now,
                now,
            )  # fmt: skip
            _attach(database, owner, store_id, files, "", "file_ids")
            made = read_store(database, owner, store_id)
        self._attached()
        return made

    def get(self, owner: str, store_id: str) -> VectorStore:
        with self._database.reading() as database:
            return read_store(database, owner, store_id)

    def page(self, owner: str, paging: Paging) -> tuple[list[VectorStore], bool]:
        """Stores, and whether there are more."""
        with self._database.reading() as database:
            rows, more = page(database, _STORE, "vector_stores WHERE owner = ?", [owner], paging, prefix=_PREFIX)
            return [_store(database, row) for row in rows], more

    def modify(
        self, owner: str, store_id: str, *, name: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> VectorStore:
        """Change the name, the metadata or both; None leaves a value unchanged."""
        with self._database.writing() as database:
            check_store(database, owner, store_id)
            if name is not None:
                sealed = seal_name(database, store_id, name)
                database.execute("UPDATE vector_stores SET name = ? WHERE id = ?", sealed, store_id)
                database.bump()  # rules may go by it
            if metadata is not None:
                sealed = seal_metadata(database, store_id, metadata)
                database.execute("UPDATE vector_stores SET metadata = ? WHERE id = ?", sealed, store_id)
            _touch(database, store_id)
            return read_store(database, owner, store_id)

    def delete(self, owner: str, store_id: str) -> None:
        with self._database.writing() as database:
            check_store(database, owner, store_id)
            removed = remove_documents(database, "collection = ?", store_id)
            database.execute("DELETE FROM vector_stores WHERE id = ?", store_id)
        self._erase(removed.text_hashes)

    # ---- their files ------------------------------------------------------------------------------------------------
    def attach(self, owner: str, store_id: str, file: FileSpec) -> VectorStoreFile:
        """Attach a file, or read it anew: chunks of an earlier reading can be found until the new ones replace them."""
        with self._database.writing() as database:
            check_store(database, owner, store_id)
            _attach(database, owner, store_id, [file], "", "file_id")
            made = read_store_file(database, store_id, file.file)
        self._attached()
        return made

    def attached(self, owner: str, store_id: str, file_id: str) -> VectorStoreFile:
        with self._database.reading() as database:
            check_store(database, owner, store_id)
            return read_store_file(database, store_id, file_id)

    def files(
        self, owner: str, store_id: str, paging: Paging, *, status: Status | None = None, batch: str | None = None
    ) -> tuple[list[VectorStoreFile], bool]:
        """Files of a store, of one status or batch if given, and whether there are more."""
        with self._database.reading() as database:
            check_store(database, owner, store_id)
            if batch is not None:
                read_batch(database, store_id, batch)
            filters = {"status": status, "batch": batch}
            rows, more = page(database, _ATTACHED, "attached WHERE store = ?", [store_id], paging, filters=filters)
            return [_file(database, row) for row in rows], more

    def modify_file(self, owner: str, store_id: str, file_id: str, attributes: Attributes) -> VectorStoreFile:
        with self._database.writing() as database:
            check_store(database, owner, store_id)
            read_store_file(database, store_id, file_id)
            database.execute(
                "UPDATE attached SET attributes = ? WHERE store = ? AND file = ?",
                seal_attributes(database, store_id, file_id, attributes), store_id, file_id,
            )  # fmt: skip
            database.bump()  # likewise
            return read_store_file(database, store_id, file_id)

    def detach(self, owner: str, store_id: str, file_id: str) -> None:
        with self._database.writing() as database:
            check_store(database, owner, store_id)
            read_store_file(database, store_id, file_id)
            removed = remove_documents(database, "collection = ? AND file = ?", store_id, file_id)
            database.execute("DELETE FROM attached WHERE store = ? AND file = ?", store_id, file_id)
            _touch(database, store_id)
        self._erase(removed.text_hashes)

    def forget_file(self, owner: str, file_id: str) -> None:
        """Delete the row of a file, with its documents in every store."""
        with self._database.writing() as database:
            if database.execute("SELECT 1 FROM files WHERE owner = ? AND id = ?", owner, file_id).fetchone() is None:
                raise missing("file", file_id)
            removed = remove_documents(database, "file = ?", file_id)
            database.execute("DELETE FROM files WHERE id = ?", file_id)
        self._erase(removed.text_hashes)

    def _erase(self, text_hashes: set[str]) -> None:
        """Erase what was removed from the disk."""
        self._document_kv.forget(text_hashes)
        self._database.checkpoint()

    # ---- batches ----------------------------------------------------------------------------------------------------
    def create_batch(self, owner: str, store_id: str, files: Sequence[FileSpec]) -> FileBatch:
        batch_id = f"vsfb_{secrets.token_hex(16)}"
        with self._database.writing() as database:
            check_store(database, owner, store_id)
            database.execute(
                "INSERT INTO file_batches (id, store, created_at, cancelled) VALUES (?, ?, ?, 0)",
                batch_id, store_id, time.time(),
            )  # fmt: skip
            _attach(database, owner, store_id, files, batch_id, "file_ids")
            database.execute(_FORGET_BATCHES, store_id, store_id, MAX_PAST_BATCHES)
            made = read_batch(database, store_id, batch_id)
        self._attached()
        return made

    def batch(self, owner: str, store_id: str, batch_id: str) -> FileBatch:
        with self._database.reading() as database:
            check_store(database, owner, store_id)
            return read_batch(database, store_id, batch_id)

    def cancel_batch(self, owner: str, store_id: str, batch_id: str) -> FileBatch:
        """Cancel the files of a batch that have not been read yet; the others stay."""
        with self._database.writing() as database:
            check_store(database, owner, store_id)
            if read_batch(database, store_id, batch_id).counts.in_progress:
                database.execute("UPDATE file_batches SET cancelled = 1 WHERE id = ?", batch_id)
            database.execute(
                "UPDATE attached SET status = 'cancelled' WHERE batch = ? AND status = 'in_progress'", batch_id
            )
            return read_batch(database, store_id, batch_id)

    # ---- searching --------------------------------------------------------------------------------------------------
    def selection(
        self, owner: str, store_ids: Sequence[str], condition: Filter | None = None
    ) -> tuple[Selection, AttributesOf]:
        """The documents to search for these stores, and the attributes of their files. Records the use of the stores.

        `default` among the ids names the documents managed by `paceline docs`; these have no attributes. Raises
        RequestError (404) for a store that the owner does not have.
        """
        ids = tuple(dict.fromkeys(store_ids))
        with self._database.reading() as database:
            now = time.time()
            for store_id in ids:
                if store_id != DEFAULT_COLLECTION:
                    check_store(database, owner, store_id)
            marks = ", ".join("?" * len(ids))
            rows = database.execute(
                "SELECT documents.id, collection, documents.file, attributes FROM documents "
                f"LEFT JOIN attached ON store = collection AND attached.file = documents.file "
                f"WHERE collection IN ({marks})",
                *ids,
            ).fetchall()
            known = {
                (store, file): open_attributes(database, store, file, attributes) if attributes else {}
                for _, store, file, attributes in rows
            }
            stale = [
                row[0]
                for row in database.execute(
                    f"SELECT id FROM vector_stores WHERE id IN ({marks}) AND active_at < ?", *ids, now - _ACTIVE_S
                )
            ]
        document_ids = None
        if condition is not None:
            document_ids = frozenset(row[0] for row in rows if matches(condition, known[row[1], row[2]]))
        if stale:
            with self._database.writing() as database:
                for store_id in stale:
                    _touch(database, store_id)
        return Selection(ids, document_ids), lambda store, file: known.get((store, file), {})


_FORGET_BATCHES = """DELETE FROM file_batches WHERE store = ?
    AND seq <= (SELECT seq FROM file_batches WHERE store = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)
    AND NOT EXISTS (SELECT 1 FROM attached WHERE batch = file_batches.id)"""


def _touch(database: Database, store_id: str) -> None:
    database.execute("UPDATE vector_stores SET active_at = ? WHERE id = ?", time.time(), store_id)


def _attach(database: Database, owner: str, store_id: str, files: Sequence[FileSpec], batch: str, param: str) -> None:
    """Insert rows `in_progress` inside the caller's transaction. `param`: the request field named in errors."""
    for file in files:
        row = database.execute("SELECT 1 FROM files WHERE owner = ? AND id = ?", owner, file.file).fetchone()
        if row is None:
            raise RequestError(f"No such file: {file.file[:64]}.", status=404, code="not_found", param=param)
        before = "DELETE FROM attached WHERE store = ? AND file = ? RETURNING usage_bytes"
        (usage,) = database.execute(before, store_id, file.file).fetchone() or (0,)  # of the previous reading
        database.execute(
            "INSERT INTO attached (store, file, batch, created_at, status, error_code, error_message, "
            "attributes, chunk_tokens, overlap, usage_bytes) VALUES (?, ?, ?, ?, 'in_progress', '', '', ?, ?, ?, ?)",
            store_id, file.file, batch, time.time(), seal_attributes(database, store_id, file.file, file.attributes),
            file.chunk_tokens, file.overlap, usage,
        )  # fmt: skip
    (count,) = database.execute("SELECT count(*) FROM attached WHERE store = ?", store_id).fetchone()
    if count > MAX_STORE_FILES:
        raise RequestError(f"A vector store holds {MAX_STORE_FILES} files at most.", code="limit_exceeded", param=param)
    _touch(database, store_id)
