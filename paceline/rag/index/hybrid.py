"""Hybrid search: chunk ids for a query, from FAISS and BM25 indexes kept consistent with the rows.

This or another process may change the rows at any time: `refresh` compares generations and applies the difference.
Everything here must be called inside a read transaction, so that indexes and rows are of the same snapshot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.rag.chunk_rows import FROM, read_texts, read_vectors
from paceline.rag.database import Database
from paceline.rag.index.bm25 import MAX_ROWS, BM25Index, rank_fusion
from paceline.rag.index.faiss_index import IndexImage, VectorIndex, remove
from paceline.rag.records import EXACT_SCORE, LEADING_COSINE, MIN_SCORE, Selection, titled

FILE = "index.faiss"
_NEAR_TIE = 0.15  # of cosines, among which a rare number decides
_MAX_CACHED = 8  # selections whose ids and word indexes are cached


@dataclass(slots=True)
class _Words:
    """The BM25 index of one selection of collections; the content of others does not affect its ranks."""

    ids: NDArray[np.int64]  # of the indexed chunks
    index: BM25Index


class HybridIndex:
    """The vector index of a whole store and the word indexes of recently searched collections. One thread at a time."""

    def __init__(self, path: Path, database: Database, dimensions: int) -> None:
        self._path = path  # of the index file
        self._database = database
        self._dimensions = dimensions
        self._vector_index = VectorIndex(np.empty(0, np.int64), np.empty((0, dimensions), np.float32))
        self._ids: dict[tuple[str, ...], NDArray[np.int64]] = {}  # chunk ids by collections, until the next change
        self._words: dict[tuple[str, ...], _Words] = {}  # by collections, rebuilt after changes; last used last
        self._stamp = ""  # store and generation of the rows that the vector index was built from
        self._file_stamp = ""  # the same of the index file

    @property
    def num_chunks(self) -> int:
        return len(self._vector_index.ids)

    def refresh(self) -> None:
        """Apply changes of the rows. Raises ConfigError when the store was meanwhile indexed with another embedder."""
        meta = self._database.meta()
        self._database.check_embedder(meta)
        stamp = f"{meta['store']} {meta['generation']}"
        if stamp == self._stamp:
            return
        if self._stamp.startswith(meta["store"]):
            self._update()
        elif loaded := VectorIndex.load(self._path, stamp, self._database.seal.index):
            self._vector_index, self._file_stamp = loaded, stamp
        else:
            self._vector_index = VectorIndex(*self._vectors(""))
        self._stamp = stamp
        self._ids.clear()

    def image(self) -> IndexImage | None:
        """The content for the index file; None if the file is up to date."""
        return None if self._stamp == self._file_stamp else self._vector_index.image(self._stamp)

    def publish(self, image: IndexImage) -> bool:
        """Replace the index file by the image written beside it. False, and nothing done, if rows changed meanwhile:
        removed vectors must not return to the disk.
        """
        if image.stamp != self._stamp:
            return False
        image.publish(self._path)
        self._file_stamp = image.stamp
        return True

    def drop_file(self) -> None:
        """Remove the index file, so that no vector is left in it. Without a file, the index is built from the rows."""
        remove(self._path)
        self._file_stamp = ""

    def selected(self, selection: Selection) -> NDArray[np.int64]:
        """(n,) ids of the chunks in a selection."""
        if selection.document_ids is None:
            if selection.collections not in self._ids:
                for oldest in list(self._ids)[: 1 - _MAX_CACHED]:
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
        self, query: str, vector: NDArray[np.float32], limit: int, selection: Selection, selected: NDArray[np.int64]
    ) -> tuple[list[tuple[int, float]], float]:
        """Pairs (chunk id, score), best first, exact hits of the words before all others (see `_scored`), from at most
        `limit` hits of each kind of search; and an upper bound of the cosines of all other chunks, exact unless an
        inverted file was searched.

        selected: `self.selected(selection)`.
        """
        found = self._vector_index.search(vector, limit, None if len(selected) == self.num_chunks else selected)
        others = found[-1][1] if found and len(found) == limit < len(selected) else -math.inf
        scores = dict(found)
        index = self._word_index(selection.collections)
        if index is None:
            return found, others
        hits = index.search(query, limit, None if selection.document_ids is None else set(selected.tolist()))
        named = {hit.id for hit in hits if hit.is_named}
        exact = named | {hit.id for hit in hits if hit.is_exact}
        fused = rank_fusion(list(scores), [hit.id for hit in hits])
        cosines = {i: scores[i] if i in scores else self._cosine(vector, i) for i in fused}
        near = max(cosines.values(), default=0.0) - _NEAR_TIE
        telling = {hit.id: hit.num_telling for hit in hits if hit.num_telling and cosines[hit.id] >= near}
        order = sorted(fused, key=lambda i: (i not in named, i not in exact, -telling.get(i, 0)))
        leading = {hit.id for hit in hits if hit.is_leading} - exact - telling.keys()
        return _scored([(i, cosines[i]) for i in order], exact, telling.keys(), leading), others

    def _word_index(self, collections: tuple[str, ...]) -> BM25Index | None:
        """The BM25 index of these collections; None where they have more than MAX_ROWS chunks."""
        ids = self.selected(Selection(collections))
        known = self._words.pop(collections, None)
        if known is None or not np.array_equal(known.ids, ids):  # ids are never reused: equal ids mean equal texts
            if len(ids) > MAX_ROWS:
                return None
            where, parameters = _collections(collections)
            found = {
                chunk.chunk_id: titled(chunk.title, chunk.text)
                for chunk in read_texts(self._database, where.removeprefix(FROM), *parameters)
            }
            known = _Words(ids, BM25Index(ids.tolist(), [found.get(chunk_id, "") for chunk_id in ids.tolist()]))
        self._words[collections] = known
        for oldest in list(self._words)[:-_MAX_CACHED]:
            del self._words[oldest]
        return known.index

    def _cosine(self, vector: NDArray[np.float32], chunk_id: int) -> float:
        found, vectors = read_vectors(self._database, "WHERE chunks.id = ?", chunk_id)
        return float(vector @ np.frombuffer(vectors, "<f4")) if len(found) else -1.0  # damaged

    def _update(self) -> None:
        """Bring the vector index in line with the rows, or rebuild it where it no longer fits their number."""
        ids = {row[0] for row in self._database.execute("SELECT id FROM chunks")}
        if removed := self._vector_index.ids - ids:
            self._vector_index.remove(removed)
        if new := ids - self._vector_index.ids:
            # Ids only grow, so the new ones are the largest.
            self._vector_index.add(*self._vectors("WHERE chunks.id >= ?", min(new)))
        if not self._vector_index.fits:
            self._vector_index = VectorIndex(*self._vectors(""))

    def _vectors(self, where: str, *parameters: object) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ids, vectors = read_vectors(self._database, where, *parameters)
        flat = np.frombuffer(vectors, "<f4").astype(np.float32)
        return ids, flat.reshape(len(ids), self._dimensions)


def _scored(
    found: list[tuple[int, float]], exact: set[int], telling: AbstractSet[int], leading: set[int]
) -> list[tuple[int, float]]:
    """Pairs (chunk id, score) of pairs (chunk id, cosine), best first: what only its words let pass comes second at
    best, as in a small store each word is rare."""
    words_alone = {i for i, cosine in found if i in leading and LEADING_COSINE <= cosine < MIN_SCORE}
    least = {
        **dict.fromkeys(words_alone, MIN_SCORE),
        **{i: MIN_SCORE for i, cosine in found if i in telling and cosine >= LEADING_COSINE},
        **dict.fromkeys(exact, EXACT_SCORE),
    }
    scores = [(i, max(cosine, least.get(i, -1.0))) for i, cosine in found]
    first = next((each for each in scores if each[0] not in words_alone and each[1] >= MIN_SCORE), None)
    return scores if first is None else [first, *(each for each in scores if each is not first)]


def _collections(names: tuple[str, ...]) -> tuple[str, list[object]]:
    """SQL after FROM for the chunks of these collections, and its parameters."""
    marks = ", ".join("?" * len(names))
    return f"{FROM} WHERE collection IN ({marks})", list(names)
