"""Query vector and words to chunk ids: keeps the FAISS and BM25 indexes in step with the rows.

Rows may change under it, by this process or another: `refresh` compares generations and takes in the difference.
Everything here must be called while the database is being read, so that indexes and rows are of one moment.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.rag.database import Database
from paceline.rag.index.bm25 import MAX_ROWS, BM25Index, rank_fusion
from paceline.rag.index.faiss_index import IndexImage, VectorIndex, remove
from paceline.rag.records import Selection, titled

FILE = "index.faiss"
_KEPT = 8  # selections whose word indexes are kept


@dataclass(slots=True)
class _Words:
    """The BM25 index of some collections, alone: what others hold changes no rank in it."""

    ids: NDArray[np.int64]  # of their chunks
    index: BM25Index


class HybridIndex:
    """One thread at a time."""

    def __init__(self, path: Path, database: Database, dimensions: int) -> None:
        self._path = path  # of the index file
        self._database = database
        self._dimensions = dimensions
        self._vector_index = VectorIndex(np.empty(0, np.int64), np.empty((0, dimensions), np.float32))
        self._ids: dict[tuple[str, ...], NDArray[np.int64]] = {}  # of the chunks of collections, until the next change
        self._words: dict[tuple[str, ...], _Words] = {}  # built by the first search after a change; last used last
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
        self._stamp = stamp
        self._ids.clear()

    def image(self) -> IndexImage | None:
        """What the index file should hold; None where it does."""
        return None if self._stamp == self._stamp_of_file else self._vector_index.image(self._stamp)

    def publish(self, image: IndexImage) -> bool:
        """What was written beside the index file takes its place. False, and nothing done, if rows changed meanwhile:
        what has gone must not come back in a file."""
        if image.stamp != self._stamp:
            return False
        image.publish(self._path)
        self._stamp_of_file = image.stamp
        return True

    def drop_file(self) -> None:
        """No vector is in an index file then; without one it is built from the rows."""
        remove(self._path)
        self._stamp_of_file = ""

    def selected(self, selection: Selection) -> NDArray[np.int64]:
        """(n,) ids of the chunks that are searched."""
        if selection.document_ids is None:
            if selection.collections not in self._ids:
                for oldest in list(self._ids)[: 1 - _KEPT]:
                    del self._ids[oldest]
                self._ids[selection.collections] = self._select(selection)
            return self._ids[selection.collections]
        return self._select(selection)

    def _select(self, selection: Selection) -> NDArray[np.int64]:
        where, parameters = _collections(selection.collections)
        if selection.document_ids is not None:
            where += " AND document IN (SELECT value FROM json_each(?))"
            parameters.append(json.dumps(sorted(selection.document_ids)))
        rows = self._database.execute(f"SELECT chunks.id FROM {where} ORDER BY chunks.id", *parameters)
        return np.fromiter((row[0] for row in rows), np.int64)

    def candidates(
        self, query: str, vector: NDArray[np.float32], wanted: int, selection: Selection, among: NDArray[np.int64]
    ) -> tuple[list[tuple[int, float]], float]:
        """(chunk id, cosine), best first by both kinds of search; up to `wanted` of each. `among`: `selected` of it.

        And the greatest cosine that any other chunk may have: exact unless an inverted file was searched.
        """
        found = self._vector_index.search(vector, wanted, None if len(among) == self.num_chunks else among)
        others = found[-1][1] if found and len(found) == wanted < len(among) else -math.inf
        scores = dict(found)
        index = self._word_index(selection.collections)
        if index is None:
            return found, others
        order = rank_fusion(
            list(scores), index.search(query, wanted, None if selection.document_ids is None else set(among.tolist()))
        )
        return [(i, scores[i] if i in scores else self._cosine(vector, i)) for i in order], others

    def _word_index(self, collections: tuple[str, ...]) -> BM25Index | None:
        """None where there are too many chunks for it."""
        there = self.selected(Selection(collections))
        known = self._words.pop(collections, None)
        if known is None or not np.array_equal(known.ids, there):  # ids are never used twice: equal ids, equal texts
            if len(there) > MAX_ROWS:
                return None
            where, parameters = _collections(collections)
            rows = self._database.execute(f"SELECT title, text FROM {where} ORDER BY chunks.id", *parameters).fetchall()
            known = _Words(there, BM25Index(there.tolist(), [titled(title, text) for title, text in rows]))
        self._words[collections] = known
        for oldest in list(self._words)[:-_KEPT]:
            del self._words[oldest]
        return known.index

    def _cosine(self, vector: NDArray[np.float32], chunk_id: int) -> float:
        (blob,) = self._database.execute("SELECT embedding FROM chunks WHERE id = ?", chunk_id).fetchone()
        return float(vector @ np.frombuffer(blob, "<f4"))

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


def _collections(names: tuple[str, ...]) -> tuple[str, list[object]]:
    """The chunks of these collections: what follows FROM, and its parameters."""
    marks = ", ".join("?" * len(names))
    return f"chunks JOIN documents ON documents.id = document WHERE collection IN ({marks})", list(names)
