"""The rows of documents and their chunks: the one module that inserts, removes and re-embeds them.

`DocumentStore` (the default collection) and vector stores (the others) both write through these functions, each inside
its own transaction. Removing returns the hashes under which stored KV of the removed texts is found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.rag.chunk import Chunk
from paceline.rag.database import Database
from paceline.rag.document_kv import text_hash
from paceline.rag.records import DEFAULT_COLLECTION, Document, Vectors, Zone, titled

_DOCUMENT = "id, name, sha256, zone, added_at, num_chunks, source"


class Removed(NamedTuple):
    """The outcome of `remove_documents`."""

    num_documents: int
    text_hashes: set[str]  # of the removed chunks' texts within their collections


def insert_document(
    database: Database,
    document: Document,
    chunks: Sequence[Chunk],
    vectors: Vectors,
    *,
    collection: str = DEFAULT_COLLECTION,
    file: str = "",
    source: bytes = b"",
) -> None:
    """Insert a document with all its chunks inside the caller's transaction. vectors: (len(chunks), dimensions)

    file: id of the uploaded file it was made from; source: path of the file it was read from.
    """
    database.execute(
        "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        document.id, document.name, document.sha256, document.zone, document.added_at, len(chunks), collection, file,
        source,
    )  # fmt: skip
    database.executemany(
        "INSERT INTO chunks (document, position, text, title, embedding) VALUES (?, ?, ?, ?, ?)",
        (
            (document.id, i, chunk.text, chunk.title, _blob(vector))
            for i, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True))
        ),
    )
    database.bump()


def insert_text(database: Database, document_id: str, text: str) -> None:
    """Keep a document's whole text, which goes with the document."""
    database.execute("INSERT INTO texts VALUES (?, ?)", document_id, text)


def find_text(database: Database, collection: str, file: str) -> str | None:
    """The whole text read from an uploaded file; None where a release before these were kept has read it."""
    row = database.execute(
        "SELECT text FROM texts JOIN documents ON documents.id = document WHERE collection = ? AND file = ?",
        collection, file,
    ).fetchone()  # fmt: skip
    return None if row is None else str(row[0])


def find_chunks(database: Database, chunk_ids: Collection[int]) -> dict[int, str]:
    """Texts of those of these chunks that exist, as they stand in prompts."""
    marks = ", ".join("?" * len(chunk_ids))
    rows = database.execute(f"SELECT id, title, text FROM chunks WHERE id IN ({marks})", *chunk_ids)
    return {chunk_id: titled(title, text).strip() for chunk_id, title, text in rows}


def remove_documents(database: Database, where: str, *parameters: object) -> Removed:
    """Remove documents with their chunks inside the caller's transaction.

    where: SQL over the columns of `documents`; `id` and `document` must be qualified, since chunks are joined.
    """
    rows = database.execute(
        f"SELECT title, text, collection FROM chunks JOIN documents ON documents.id = document WHERE {where}",
        *parameters,
    )
    text_hashes = {text_hash(titled(title, text), collection) for title, text, collection in rows}
    num_documents = database.execute(f"DELETE FROM documents WHERE {where}", *parameters).rowcount
    if num_documents:
        database.bump()
        database.bump_removals()
    return Removed(num_documents, text_hashes)


def replace_vectors(database: Database, chunk_ids: Sequence[int], vectors: Vectors) -> None:
    """Store new embeddings of all chunks inside the caller's transaction, and record the embedder that made them."""
    database.executemany(
        "UPDATE chunks SET embedding = ? WHERE id = ?",
        ((_blob(vector), chunk_id) for vector, chunk_id in zip(vectors, chunk_ids, strict=True)),
    )
    database.renew()


def set_zone(database: Database, document_id: str, zone: Zone) -> None:
    database.execute("UPDATE documents SET zone = ? WHERE id = ?", zone, document_id)


def set_source(database: Database, document_id: str, source: bytes) -> None:
    database.execute("UPDATE documents SET source = ? WHERE id = ?", source, document_id)


# ---- reading the default collection ---------------------------------------------------------------------------------
def managed_documents(database: Database) -> list[Document]:
    """All documents of the default collection, ordered by name."""
    rows = database.execute(
        f"SELECT {_DOCUMENT} FROM documents WHERE collection = ? ORDER BY name", DEFAULT_COLLECTION
    ).fetchall()
    return [_document(row) for row in rows]


def find_by_text(database: Database, sha256: str) -> Document | None:
    """The managed document with this text."""
    row = database.execute(
        f"SELECT {_DOCUMENT} FROM documents WHERE collection = ? AND sha256 = ?", DEFAULT_COLLECTION, sha256
    ).fetchone()
    return row and _document(row)


def find_by_source(database: Database, name: str, source: bytes) -> Document | None:
    """The managed document read from this file earlier; for a text without a file, the one of the same name."""
    row = database.execute(
        f"SELECT {_DOCUMENT} FROM documents WHERE collection = ? AND source = ? AND (source != x'' OR name = ?) "
        "AND file = ''",
        DEFAULT_COLLECTION, source, name,
    ).fetchone()  # fmt: skip
    return row and _document(row)


def is_name_taken(database: Database, name: str) -> bool:
    """True if a managed document has this name."""
    taken = "SELECT 1 FROM documents WHERE collection = ? AND name = ? AND file = ''"
    return database.execute(taken, DEFAULT_COLLECTION, name).fetchone() is not None


def _document(row: tuple[str, str, str, Zone, float, int, bytes]) -> Document:
    """A record from a row with the columns `_DOCUMENT`."""
    return Document(*row[:-1], row[-1].decode("utf-8", "replace"))


def _blob(vector: NDArray[np.float32]) -> bytes:
    return vector.astype("<f4").tobytes()
