"""The rows of documents and their chunks: what inserts, reads, removes and re-embeds them.

`DocumentStore` (the default collection) and vector stores (the others) both write through these functions, each inside
its own transaction. In a sealed store each document has a data key in its row, and columns that are searched hold keyed
hashes. A value that was changed on the disk is told in the log with its document, and keeps no other from being read.
Removing returns the hashes under which stored KV of the removed texts is found.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.rag.chunk import Chunk
from paceline.rag.database import Database
from paceline.rag.document_kv import text_hash
from paceline.rag.embedder import unit
from paceline.rag.records import DEFAULT_COLLECTION, Document, Passage, Vectors, Zone
from paceline.sealing import Box, DamagedError

FROM = "chunks JOIN documents ON documents.id = document"
_DOCUMENT = "id, name, sha256, zone, added_at, num_chunks, source, key, sealed"
_RECORD = "record"  # what `sealed` is, to its seal
AROUND = 2  # chunks before and after a passage that are shown with it
MAX_READINGS = 20_000  # kept; the oldest go first
_DAMAGED = "(damaged)"  # in place of a name that cannot be read
_logger = logging.getLogger("paceline.rag")


class ShownPassage(NamedTuple):
    """A passage with what stands around it in its document: chunks, whose texts overlap a little."""

    passage: Passage  # without a score
    before: tuple[str, ...]
    after: tuple[str, ...]


class RemovedRows(NamedTuple):
    num_documents: int
    text_hashes: set[str]  # of the removed chunks' texts within their collections


# ---- changes --------------------------------------------------------------------------------------------------------
def insert_document(
    database: Database,
    document: Document,
    chunks: Sequence[Chunk],
    vectors: Vectors,
    *,
    collection: str = DEFAULT_COLLECTION,
    file: str = "",
    source: bytes = b"",
    stamp: str = "",
    text: str = "",
) -> None:
    """Insert a document with all its chunks inside the caller's transaction. vectors: (len(chunks), dimensions)

    file: id of the uploaded file it was made from; source, stamp: path and stamp of the file it was read from. text:
    the whole of it, which is kept and goes with the document; "": it is not.
    """
    seal = database.seal
    key, box = seal.make_key(document.id)
    database.execute(
        "INSERT INTO documents (id, name, sha256, zone, added_at, num_chunks, collection, file, source, stamp, key, "
        "sealed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        document.id, seal.lookup(document.name), seal.lookup(document.sha256), document.zone, document.added_at,
        len(chunks), collection, file, stored_source(database, source), seal.lookup(stamp), key,
        seal_record(box, document.name, document.sha256, source) if seal.is_on else b"",
    )  # fmt: skip
    database.executemany(
        "INSERT INTO chunks (document, position, title, text, embedding, place) VALUES (?, ?, ?, ?, ?, ?)",
        (
            (document.id, i, title, text, _stored_vector(database, embedding), place)
            for i, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True))
            for title, text, embedding, place in [
                seal_chunk(box, i, chunk.title, chunk.text, packed(vector), chunk.place)
            ]
        ),
    )
    if text:
        database.execute("INSERT INTO texts VALUES (?, ?)", document.id, box.seal_text(text, "whole text"))
    database.bump()


def remove_documents(database: Database, where: str, *parameters: object) -> RemovedRows:
    """Remove documents with their chunks inside the caller's transaction.

    where: SQL over the columns of `documents`; `id` and `document` must be qualified, since chunks are joined.
    """
    secret = database.seal.kv_secret
    passages = read_passages(database, f"WHERE {where}", *parameters)
    text_hashes = {text_hash(passage.titled, passage.collection, secret) for passage in passages}
    num_documents = database.execute(f"DELETE FROM documents WHERE {where}", *parameters).rowcount
    if num_documents:
        database.seal.forget()
        database.bump()
        database.bump_removals()
    return RemovedRows(num_documents, text_hashes)


def replace_vectors(database: Database, chunk_ids: Sequence[int], vectors: Vectors) -> None:
    """Store new embeddings of all chunks inside the caller's transaction, and record the embedder that made them."""
    rows = database.execute(f"SELECT chunks.id, position, documents.id, key FROM {FROM}").fetchall()
    of_each = dict(zip(chunk_ids, vectors, strict=True))
    database.executemany(
        "UPDATE chunks SET embedding = ? WHERE id = ?",
        (
            (
                _stored_vector(
                    database, database.seal.box(key, document).seal(packed(of_each[chunk_id]), f"vector {position}")
                ),
                chunk_id,
            )
            for chunk_id, position, document, key in rows
        ),
    )
    database.renew()


def set_zone(database: Database, document_id: str, zone: Zone) -> None:
    database.execute("UPDATE documents SET zone = ? WHERE id = ?", zone, document_id)


def set_stamp(database: Database, document_id: str, stamp: str) -> None:
    """Record that a document is what its file said when it had this stamp."""
    database.execute("UPDATE documents SET stamp = ? WHERE id = ?", database.seal.lookup(stamp), document_id)


def set_source(database: Database, document: Document, name: str, source: bytes) -> None:
    """Record that a document is read from this file, under this name; its stamp is the caller's to set. Raises
    DamagedError."""
    sealed = b""
    if database.seal.is_on:
        key, record = database.execute("SELECT key, sealed FROM documents WHERE id = ?", document.id).fetchone()
        box = database.seal.box(key, document.id)
        _, sha256, _ = _open_record(box, record)
        sealed = seal_record(box, name, sha256, source)
    database.execute(
        "UPDATE documents SET name = ?, source = ?, sealed = ? WHERE id = ?",
        database.seal.lookup(name), stored_source(database, source), sealed, document.id,
    )  # fmt: skip
    database.bump()


# ---- reading chunks -------------------------------------------------------------------------------------------------
def read_passages(database: Database, where: str, *parameters: object, strict: bool = False) -> list[Passage]:
    """Chunks as passages without scores, ordered by id; damaged ones are left out. where: SQL after FROM.

    strict: raise DamagedError for a damaged one.
    """
    rows = database.execute(
        "SELECT chunks.id, position, title, text, place, collection, file, documents.id, name, key, sealed "
        f"FROM {FROM} {where} ORDER BY chunks.id",
        *parameters,
    ).fetchall()
    passages = []
    for chunk_id, position, title, text, place, collection, file, document, name, key, sealed in rows:
        try:
            box = database.seal.box(key, document)
            if database.seal.is_on:
                name, *_ = _open_record(box, sealed)
            texts = (box.open_text(title, f"title {position}"), box.open_text(text, f"text {position}"))
            place = box.open_text(place, f"place {position}")
        except DamagedError as error:
            if strict:
                raise
            _report(document, error)
            continue
        passages.append(Passage(name, chunk_id, *texts, 0.0, file or document, collection, place=place))
    return passages


def find_chunks(database: Database, chunk_ids: Collection[int]) -> list[Passage]:
    """Those of these chunks that exist, as of `read_passages`."""
    marks = ", ".join("?" * len(chunk_ids))
    return read_passages(database, f"WHERE chunks.id IN ({marks})", *chunk_ids)


def find_passage(database: Database, owner: str, chunk_id: int) -> ShownPassage | None:
    """A passage of the default collection or of a vector store of this owner; None for any other, and a damaged one."""
    row = database.execute(
        f"SELECT documents.id, position FROM {FROM} WHERE chunks.id = ? AND (collection = ? OR collection IN "
        "(SELECT id FROM vector_stores WHERE owner = ?))",
        chunk_id, DEFAULT_COLLECTION, owner,
    ).fetchone()  # fmt: skip
    if row is None:
        return None
    document, position = row
    around = read_around(database, document, position, AROUND)
    passage = next((each for each in around if each.chunk_id == chunk_id), None)
    if passage is None:
        return None
    before = tuple(each.text.strip() for each in around if each.chunk_id < chunk_id)
    return ShownPassage(passage, before, tuple(each.text.strip() for each in around if each.chunk_id > chunk_id))


def read_around(database: Database, document: str, position: int, count: int) -> list[Passage]:
    """A chunk with so many before and after it, in order: a document's chunks are inserted in order."""
    where = "WHERE documents.id = ? AND position BETWEEN ? AND ?"
    return read_passages(database, where, document, position - count, position + count)


def read_vectors(
    database: Database, dimensions: int, where: str, *parameters: object
) -> tuple[NDArray[np.int64], Vectors]:
    """((n,) chunk ids in order, their vectors (n, dimensions)); damaged ones are left out."""
    rows = database.execute(
        f"SELECT chunks.id, embedding, position, documents.id, key FROM {FROM} {where} ORDER BY chunks.id", *parameters
    ).fetchall()
    ids, stored = [], []
    for chunk_id, embedding, position, document, key in rows:
        try:
            stored.append(database.seal.box(key, document).open(embedding, f"vector {position}"))
        except DamagedError as error:
            _report(document, error)
            continue
        ids.append(chunk_id)
    return np.array(ids, np.int64), unpacked(stored, dimensions)


def find_text(database: Database, collection: str, file: str) -> str | None:
    """The whole text read from an uploaded file; None where it is gone. Raises DamagedError."""
    row = database.execute(
        "SELECT text, id, key FROM texts JOIN documents ON documents.id = document WHERE collection = ? AND file = ?",
        collection, file,
    ).fetchone()  # fmt: skip
    return None if row is None else database.seal.box(row[2], row[1]).open_text(row[0], "whole text")


# ---- reading the default collection ---------------------------------------------------------------------------------
def managed_documents(database: Database) -> list[Document]:
    """All documents of the default collection, ordered by name."""
    rows = database.execute(f"SELECT {_DOCUMENT} FROM documents WHERE collection = ?", DEFAULT_COLLECTION).fetchall()
    return sorted((_document(database, row) for row in rows), key=lambda document: document.name)


def all_documents(database: Database) -> Iterator[tuple[Document, str, str]]:
    """Those of every collection, with it and the id of the uploaded file; a damaged one has no `sha256`."""
    for *row, collection, file in database.execute(f"SELECT {_DOCUMENT}, collection, file FROM documents").fetchall():
        yield _document(database, tuple(row)), collection, file


def find_by_text(database: Database, sha256: str) -> Document | None:
    """The managed document with this text."""
    return _managed(database, "sha256 = ?", database.seal.lookup(sha256))


def find_by_source(database: Database, name: str, source: bytes) -> Document | None:
    """The managed document read from this file earlier; for a text without a file, the one of the same name."""
    where = "source = ? AND (source != x'' OR name = ?) AND file = ''"
    return _managed(database, where, stored_source(database, source), database.seal.lookup(name))


def find_by_stamp(database: Database, source: bytes, stamp: str) -> Document | None:
    """The managed document that was read from this file when it had this stamp."""
    where = "source = ? AND source != x'' AND stamp = ? AND file = ''"
    return _managed(database, where, stored_source(database, source), database.seal.lookup(stamp))


def _managed(database: Database, where: str, *values: str | bytes) -> Document | None:
    """One of the default collection. where: a condition with a place for each value."""
    select = f"SELECT {_DOCUMENT} FROM documents WHERE collection = ? AND {where}"
    row = database.execute(select, DEFAULT_COLLECTION, *values).fetchone()
    return row and _document(database, row)


def is_name_taken(database: Database, name: str) -> bool:
    taken = "SELECT 1 FROM documents WHERE collection = ? AND name = ? AND file = ''"
    return database.execute(taken, DEFAULT_COLLECTION, database.seal.lookup(name)).fetchone() is not None


def document_id(database: Database, sha256: str) -> str:
    """The id of a managed document with this text."""
    return f"doc-{database.seal.lookup(sha256)[:24]}"


def _document(database: Database, row: tuple[str, str, str, Zone, float, int, bytes, bytes, bytes]) -> Document:
    """A record from a row with the columns `_DOCUMENT`."""
    number, name, sha256, zone, added_at, num_chunks, source, key, sealed = row
    if database.seal.is_on:
        try:
            name, sha256, source = _open_record(database.seal.box(key, number), sealed)
        except DamagedError as error:
            _report(number, error)
            name, sha256, source = _DAMAGED, "", b""
    return Document(number, name, sha256, zone, added_at, num_chunks, source.decode("utf-8", "replace"))


# ---- what models have said of passages -------------------------------------------------------------------------------
def _reading_box(database: Database, chunk_id: int) -> Box | None:
    """Of the passage's document; None where it is gone."""
    row = database.execute(f"SELECT documents.id, key FROM {FROM} WHERE chunks.id = ?", chunk_id).fetchone()
    return None if row is None else database.seal.box(row[1], row[0])


def find_reading(database: Database, chunk_id: int, asked: str) -> str | None:
    """asked: a hash of all that the text depends on, its owner included. None where nothing is kept."""
    row = database.execute(
        "SELECT text FROM readings WHERE asked = ? AND chunk = ?", database.seal.lookup(asked), chunk_id
    ).fetchone()
    if row is None or (box := _reading_box(database, chunk_id)) is None:
        return None
    try:
        return box.open_text(row[0], f"reading {asked}")
    except DamagedError as error:
        _report(str(chunk_id), error)
        return None


def keep_reading(database: Database, chunk_id: int, asked: str, owner: str, text: str) -> None:
    """In the caller's transaction; it goes with the passage's document. Nothing where that is gone."""
    if (box := _reading_box(database, chunk_id)) is None:
        return
    database.execute(
        "INSERT INTO readings (chunk, asked, owner, text) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
        chunk_id, database.seal.lookup(asked), owner, box.seal_text(text, f"reading {asked}"),
    )  # fmt: skip
    database.execute("DELETE FROM readings WHERE seq <= (SELECT max(seq) FROM readings) - ?", MAX_READINGS)


# ---- sealed values --------------------------------------------------------------------------------------------------
def seal_record(box: Box, name: str, sha256: str, source: bytes) -> bytes:
    """What `sealed` holds of a document."""
    return box.seal(msgspec.msgpack.encode((name, sha256, source)), _RECORD)


def _open_record(box: Box, sealed: bytes) -> tuple[str, str, bytes]:
    """(name, sha256, source) of a document. Raises DamagedError."""
    return msgspec.msgpack.decode(box.open(sealed, _RECORD), type=tuple[str, str, bytes])


def stored_source(database: Database, source: bytes) -> bytes:
    """What stands in the column `source` for a path."""
    return database.seal.lookup(source).encode() if database.seal.is_on else source


def seal_chunk(
    box: Box, position: int, title: str, text: str, vector: bytes, place: str
) -> tuple[str | bytes, str | bytes, bytes, str | bytes]:
    """The stored form of (title, text, vector as it is stored, place)."""
    texts = box.seal_text(title, f"title {position}"), box.seal_text(text, f"text {position}")
    return *texts, box.seal(vector, f"vector {position}"), box.seal_text(place, f"place {position}")


def packed(vector: NDArray[np.float32]) -> bytes:
    """A vector of unit norm as it is stored: a byte a number, the largest 127, since its norm is known. Cosines change
    by less than 0.002, by 0.0003 in the mean."""
    largest = max(float(np.abs(vector).max(initial=0.0)), 1e-12)
    return np.round(vector * np.float32(127 / largest)).astype(np.int8).tobytes()


def _stored_vector(database: Database, value: bytes) -> bytes | str:
    """What the column `embedding` takes: in a shared database the vector as it is searched, so that cosines are the
    same in any store."""
    return written(unpacked([value], len(value))[0]) if database.is_shared else value


def written(vector: NDArray[np.float32]) -> str:
    """A vector as pgvector reads it, to the last bit."""
    return f"[{','.join([f'{number:.9g}' for number in vector.tolist()])}]"


def unpacked(stored: Sequence[bytes], dimensions: int) -> Vectors:
    """(n, dimensions) of values of the column `embedding` in a file; zeros for what is none."""
    vectors = np.zeros((len(stored), dimensions), np.float32)
    places = [i for i, each in enumerate(stored) if len(each) == dimensions]
    vectors[places] = np.frombuffer(b"".join(stored[i] for i in places), np.int8).reshape(len(places), dimensions)
    return unit(vectors)


def _report(document: str, error: DamagedError) -> None:
    """Tell the operator of a document that cannot be read whole."""
    _logger.error("the document %s is damaged on the disk (%s): remove it and add it again", document, error)
