"""Query vector and words to chunk ids: keeps the FAISS and BM25 indexes in step with the rows.

Rows may change under it, by this process or another: `refresh` compares generations and takes in the difference.
Everything here must be called while the database is being read, so that indexes and rows are of one moment.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.rag.database import Database
from paceline.rag.index import VectorIndex
from paceline.rag.lexical import MAX_ROWS, LexicalIndex, fused
from paceline.rag.records import titled

FILE = "index.faiss"


class Searcher:
    """One thread at a time."""

    def __init__(self, path: Path, database: Database, dimensions: int) -> None:
        self._path = path  # of the index file
        self._database = database
        self._dimensions = dimensions
        self._vector_index = VectorIndex(np.empty(0, np.int64), np.empty((0, dimensions), np.float32))
        self._lexical_index: LexicalIndex | None = None  # built by the first search after a change
        self._stamp = ""  # of which rows the vector index was made: store and generation
        self._stamp_of_file = ""

    @property
    def num_chunks(self) -> int:
        return len(self._vector_index.ids)

    def refresh(self) -> None:
        """Raises ConfigError when the store was meanwhile indexed again with another embedder."""
        meta = self._database.meta()
        self._database.check_embedder(meta)
        stamp = f"{meta['store']} {meta['generation']}"
        if stamp == self._stamp:
            return
        if self._stamp.startswith(meta["store"]):
            self._update()
        elif loaded := VectorIndex.load(self._path, stamp):
            self._vector_index, self._stamp_of_file = loaded, stamp
        else:
            self._vector_index = VectorIndex(*self._vectors(""))
        self._lexical_index = None
        self._stamp = stamp

    def save(self) -> None:
        """Writes the index file where it is not of these rows."""
        if self._stamp != self._stamp_of_file:
            self._vector_index.save(self._path, self._stamp)
            self._stamp_of_file = self._stamp

    def candidates(self, query: str, vector: NDArray[np.float32], wanted: int) -> list[tuple[int, float]]:
        """(chunk id, cosine), best first by both kinds of search; up to `wanted` of each."""
        scores = dict(self._vector_index.search(vector, wanted))
        if self.num_chunks > MAX_ROWS:
            return list(scores.items())
        if self._lexical_index is None:
            rows = self._database.execute("SELECT id, title, text FROM chunks ORDER BY id").fetchall()
            self._lexical_index = LexicalIndex([row[0] for row in rows], [titled(row[1], row[2]) for row in rows])
        order = fused(list(scores), self._lexical_index.search(query, wanted))
        return [(i, scores[i] if i in scores else self._vector_index.score(vector, i)) for i in order]

    def _update(self) -> None:
        there = {row[0] for row in self._database.execute("SELECT id FROM chunks")}
        if gone := self._vector_index.ids - there:
            self._vector_index.remove(gone)
        if new := there - self._vector_index.ids:
            # Ids only grow, so the new ones are the last.
            self._vector_index.add(*self._vectors("WHERE id >= ?", min(new)))
        if not self._vector_index.fits:
            self._vector_index = VectorIndex(*self._vectors(""))

    def _vectors(self, where: str, *parameters: object) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        rows = self._database.execute(f"SELECT id, embedding FROM chunks {where} ORDER BY id", *parameters).fetchall()
        flat = np.frombuffer(b"".join(row[1] for row in rows), "<f4").astype(np.float32)
        return np.array([row[0] for row in rows], np.int64), flat.reshape(len(rows), self._dimensions)
