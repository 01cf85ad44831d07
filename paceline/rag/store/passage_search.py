"""Search over one document store, and the index file that saves building the index at the next start.

The index is derived from the rows, which may change under it at any time: each search first takes in what this or
another process has committed. Safe to use from several threads; the connection's lock also guards the index.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.rag.chunk_rows import FROM
from paceline.rag.database import Database, SharedConnection
from paceline.rag.embedder import Embedder
from paceline.rag.index.hybrid import FILE, HybridIndex
from paceline.rag.records import Passage, Selection
from paceline.rag.store.document_rows import PASSAGE, open_passage

_CANDIDATES = 50  # of each kind of search


class PassageSearch:
    """Passages for a query, by vectors and words. The index refreshes from the rows before each search."""

    def __init__(self, directory: Path, embedder: Embedder, database: Database, connection: SharedConnection) -> None:
        """`database`: the one that `connection` shares; the index reads it inside the connection's transactions."""
        self._path = directory / FILE
        self._embedder = embedder
        self._connection = connection
        self._saving = threading.Lock()  # of the file written beside the index file; taken before the connection's lock
        self._index = HybridIndex(self._path, database, embedder.dimensions)

    def search(
        self, query: str, k: int, selection: Selection, *, min_score: float, vector: NDArray[np.float32] | None = None
    ) -> list[Passage]:
        """As `DocumentStore.search`. The lock is not held while the query is embedded."""
        if k < 1 or not query.strip():
            return []
        with self._connection.reading():
            self._index.refresh()
            if not len(self._index.selected(selection)):
                return []  # without loading a model
        if vector is None:
            vector = self._embedder.embed([query])[0]
        with self._connection.reading() as database:
            self._index.refresh()
            selected = self._index.selected(selection)
            limit = max(_CANDIDATES, 4 * k)
            while True:
                candidates, others = self._index.candidates(query, vector, limit, selection, selected)
                passages = _passages(database, [hit for hit in candidates if hit[1] >= min_score], k)
                if len(passages) == k or others < min_score:
                    return passages
                limit *= 4  # many copies of one text

    def save_index(self) -> bool:
        """As `DocumentStore.save_index`."""
        with self._saving:
            with self._connection.reading() as database:
                self._index.refresh()
                image = self._index.image()
                box = database.seal.index
            if image is None or not image.write(self._path, box):
                return True
            with self._connection.reading():
                self._index.refresh()
                return self._index.publish(image)

    def drop_index_file(self) -> None:
        """As `DocumentStore.drop_index_file`."""
        with self._connection.locked():
            self._index.drop_file()


def _passages(database: Database, hits: list[tuple[int, float]], k: int) -> list[Passage]:
    """The first k passages with distinct texts. hits: (chunk id, score), best first."""
    passages: dict[str, Passage] = {}  # by text without its spacing, so that copies collapse
    for chunk_id, score in hits:
        file, collection, document, *row = database.execute(
            f"SELECT file, collection, documents.id, {PASSAGE} FROM {FROM} WHERE chunks.id = ?", chunk_id
        ).fetchone()
        if (opened := open_passage(database, *row)) is None:
            continue
        name, title, text, place = opened
        passage = Passage(name, chunk_id, title, text, min(score, 1.0), file or document, collection, place=place)
        passages.setdefault(" ".join(text.split()), passage)
        if len(passages) == k:
            break
    return list(passages.values())
