"""Reading chunks: their texts and vectors, opened where the store is sealed.

A value that was changed on the disk is told in the log with its document, and does not keep others from being read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.rag.database import Database
from paceline.sealing import Box, DamagedError

FROM = "chunks JOIN documents ON documents.id = document"
_logger = logging.getLogger("paceline.rag")


class ChunkText(NamedTuple):
    """The text of a chunk, and where it belongs."""

    chunk_id: int
    title: str
    text: str
    document: str  # id
    collection: str


def read_texts(database: Database, where: str, *parameters: object, strict: bool = False) -> Iterator[ChunkText]:
    """Texts of chunks, ordered by chunk id; damaged ones are left out. where: SQL after FROM, with its parameters.

    strict: raise DamagedError for a damaged one. Read to the end inside the caller's transaction.
    """
    rows = database.execute(
        f"SELECT chunks.id, title, text, position, documents.id, key, collection FROM {FROM} {where} "
        "ORDER BY chunks.id",
        *parameters,
    ).fetchall()
    for chunk_id, title, text, position, document, key, collection in rows:
        try:
            box = database.seal.box(key, document)
            yield ChunkText(chunk_id, *open_text(box, position, title, text), document, collection)
        except DamagedError as error:
            if strict:
                raise
            report(document, error)


def read_vectors(database: Database, where: str, *parameters: object) -> tuple[NDArray[np.int64], bytes]:
    """((n,) chunk ids in order, their vectors as float32, little-endian); damaged ones are left out."""
    rows = database.execute(
        f"SELECT chunks.id, embedding, position, documents.id, key FROM {FROM} {where} ORDER BY chunks.id", *parameters
    ).fetchall()
    ids, vectors = [], []
    for chunk_id, embedding, position, document, key in rows:
        try:
            vectors.append(database.seal.box(key, document).open(embedding, _vector(position)))
        except DamagedError as error:
            report(document, error)
            continue
        ids.append(chunk_id)
    return np.array(ids, np.int64), b"".join(vectors)


def open_text(box: Box, position: int, title: str | bytes, text: str | bytes) -> tuple[str, str]:
    """(title, text) of a chunk. Raises DamagedError."""
    return box.open_text(title, f"title {position}"), box.open_text(text, f"text {position}")


def open_place(box: Box, position: int, place: str | bytes) -> str:
    """A chunk's place in its document. Raises DamagedError."""
    return box.open_text(place, f"place {position}")


def seal_chunk(
    box: Box, position: int, title: str, text: str, vector: NDArray[np.float32], place: str
) -> tuple[str | bytes, str | bytes, bytes, str | bytes]:
    """The stored form of (title, text, vector, place)."""
    sealed = box.seal_text(title, f"title {position}"), box.seal_text(text, f"text {position}")
    return *sealed, seal_vector(box, position, vector), box.seal_text(place, f"place {position}")


def seal_vector(box: Box, position: int, vector: NDArray[np.float32]) -> bytes:
    return box.seal(vector.astype("<f4").tobytes(), _vector(position))


def report(document: str, error: DamagedError) -> None:
    """Tell the operator of a document that cannot be read whole."""
    _logger.error("the document %s is damaged on the disk (%s): remove it and add it again", document, error)


def _vector(position: int) -> str:
    return f"vector {position}"
