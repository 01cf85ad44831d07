"""Indexes over chunks: chunk ids for a query, from vectors and words in memory, kept consistent with the rows. In a
database that servers share, pgvector searches the vectors there.

This or another process may change the rows at any time: `refresh` compares generations and applies the difference.
Everything here must be called inside a read transaction, so that indexes and rows are of the same snapshot. No file
holds an index: reading 50,000 vectors from the rows takes less than a second, and the words take longer.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.words import Words
from paceline.rag.database import Database
from paceline.rag.records import EXACT_SCORE, LEADING_COSINE, MIN_SCORE, Selection, Vectors
from paceline.rag.rows import FROM, read_passages, read_vectors, written

if TYPE_CHECKING:
    import bm25s  # type: ignore[import-untyped]  # it ships no types


# ---- words: BM25 (Robertson et al. 1994, by bm25s), and its fusion with the search by vectors -----------------------
# Finds names and numbers that embeddings blur. Reciprocal ranks decide the order (Cormack et al. 2009), but a chunk
# that holds what is rare in the query comes before all that do not: ranks alone weigh the one exact hit like the best
# of many near ties. Words and their spellings: `core.words`. Held in memory and rebuilt as a whole: 10,000 chunks take
# 1.5 s.
MAX_ROWS = 20_000  # above, order is by cosine alone, since a rebuild after each change would take seconds
_RANK_OFFSET = 10  # damps the lead of the first ranks; 5 to 60 gave the same within 1 %
_RARE_SHARE = 0.002  # of the chunks, which may hold a rare word; and always as many as _RARE_CHUNKS
_RARE_CHUNKS = 3
_LEADING = 2
_EXACT_WEIGHT = 0.75  # of the query's words by their weight, that an exact hit holds
_NAMING_CHUNKS = 20  # may hold a number that names something; a rare one as many as other rare words
_NAMING_DIGITS = 5  # by which a number names something, whatever it is; with letters or marks in it one fewer
_TELLING_DIGITS = 3  # of any number that counts more than other words


@dataclass(frozen=True, slots=True)
class WordHit:
    """A chunk that shares a word with the query."""

    id: int
    is_named: bool  # it holds a number of the query that names something: PPR-1148, an invoice's, a date
    is_exact: bool  # it holds nearly all of the query by weight, a rare word among it
    is_leading: bool  # it is one of the first _LEADING, and holds a rare word of the query
    num_telling: int  # how many other rare numbers of the query it holds (1148, a year), or pairs of Han, Kana, Thai


class BM25Index:
    """BM25 over a fixed set of chunks."""

    def __init__(self, ids: NDArray[np.int64], texts: Sequence[str]) -> None:
        self.ids = ids
        self._indexes: list[bm25s.BM25] = []  # of words, and of their parts: else parts would make texts longer
        corpora: tuple[list[list[str]], list[list[str]]] = ([], [])
        for text in texts:
            words = Words(text)
            corpora[0].append(_unstopped(words))
            corpora[1].append(list(words.parts()))
        for corpus in filter(any, corpora):
            import bm25s

            logging.getLogger("bm25s").setLevel(logging.WARNING)  # when imported it asks for all of its messages
            self._indexes.append(bm25s.BM25())
            self._indexes[-1].index(corpus, show_progress=False)

    def search(self, query: str, k: int, allowed: Container[int] | None = None) -> list[WordHit]:
        """At most k chunks that share a word with the query, best first: those that a number names before all others.

        allowed: only these ids; None: all.
        """
        asked = Words(query)
        words = _unstopped(asked)
        tokens = [*words, *asked.parts()]
        if not self._indexes or not tokens:
            return []
        scores = np.sum([index.get_scores(tokens) for index in self._indexes], axis=0)
        exact, rare = self._exact(set(words))
        named, telling = self._numbers(asked)
        best = (place for place in np.lexsort((-scores, -named)).tolist() if scores[place] > 0)
        chosen = islice((place for place in best if allowed is None or self.ids.item(place) in allowed), k)
        return [
            WordHit(
                self.ids.item(place),
                bool(named[place]),
                bool(exact[place]),
                rank < _LEADING and bool(rare[place]),
                int(telling[place]),
            )
            for rank, place in enumerate(chosen)
        ]

    def _exact(self, words: set[str]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(chunks,) whether each holds nearly all of these words by weight, and a rare one among them; and whether it
        holds a rare one."""
        num_chunks = len(self.ids)
        held_weight, has_rare, whole = np.zeros(num_chunks), np.zeros(num_chunks, np.bool_), 0.0
        for word in sorted(words):
            holders = self._holders(word)
            # As BM25 weighs a word; one that no chunk holds weighs most.
            weight = math.log1p((num_chunks - len(holders) + 0.5) / (len(holders) + 0.5))
            whole += weight
            held_weight[holders] += weight
            if len(holders) <= self._rare:
                has_rare[holders] = True
        return has_rare & (held_weight >= _EXACT_WEIGHT * whole), has_rare

    def _numbers(self, query: Words) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(chunks,) how many numbers of the query name each; and how much else each holds that is rare and tells more
        than a word: other numbers, and pairs of scripts without blanks, of which an embedder may know none.

        Of each number the most telling form counts that any chunk holds, so that PPR-1148 is not looked for by 1148.
        """
        named, telling = np.zeros((2, len(self.ids)), np.int64)
        for forms in query.numbers():
            form, holders = next(((form, found) for form in forms if len(found := self._holders(form))), ("", _NOBODY))
            digits, is_rare = sum(map(str.isdigit, form)), len(holders) <= self._rare
            if form.isdigit():
                names = len(form.rstrip("0")) >= _NAMING_DIGITS  # 65000 is an amount
            else:
                names = digits >= _NAMING_DIGITS - (not _AMOUNT.fullmatch(form))
            if (names and len(holders) <= _NAMING_CHUNKS) or (digits >= _TELLING_DIGITS and "." in form and is_rare):
                named[holders] += 1
            elif digits >= _TELLING_DIGITS and is_rare:
                telling[holders] += 1
        for pair in query.pairs():
            if len(holders := self._holders(pair)) <= self._rare:
                telling[holders] += 1
        return named, telling

    @property
    def _rare(self) -> float:
        """Chunks that may hold a rare word."""
        return max(_RARE_CHUNKS, _RARE_SHARE * len(self.ids))

    def _holders(self, word: str) -> NDArray[np.int32]:
        """The places of the chunks that hold a word."""
        found = _NOBODY
        for index in self._indexes:
            if (number := index.vocab_dict.get(word)) is not None:
                start, end = index.scores["indptr"][number : number + 2]
                found = np.union1d(found, index.scores["indices"][start:end])
        return found


_NOBODY: NDArray[np.int32] = np.empty(0, np.int32)
_AMOUNT = re.compile(r"\d+[^\W\d]+")  # 1980s, 2000m


def rank_fusion(*rankings: Sequence[int]) -> list[int]:
    """Reciprocal rank fusion; ties go to the item seen first."""
    weight: dict[int, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking):
            weight[item] = weight.get(item, 0.0) + 1 / (_RANK_OFFSET + rank)
    return sorted(weight, key=weight.__getitem__, reverse=True)


def _unstopped(words: Words) -> list[str]:
    stop = _stop_words()
    return [_singular(word) for word in words.words() if word not in stop]


def _singular(word: str) -> str:
    """An English plural without its end, as another word that ends so (Harman 1991, the stemmer of "s")."""
    if len(word) < 4 or not word.isalpha() or word[-1] != "s" or word[-2] in "su":
        return word
    return word[:-3] + "y" if word.endswith("ies") and word[-4] not in "ae" else word[:-1]


@cache
def _stop_words() -> frozenset[str]:
    from bm25s.stopwords import STOPWORDS_EN_PLUS  # type: ignore[import-untyped]  # it ships no types

    return frozenset(STOPWORDS_EN_PLUS)


# ---- vectors, and both together -------------------------------------------------------------------------------------
_NEAR_TIE = 0.15  # of cosines, among which a rare number decides
_NAMED_LEAD = 0.1  # of what a number names over all else: the entries of a log differ in their dates alone
_MAX_CACHED = 8  # selections whose ids and word indexes are cached


class VectorIndex:
    """Exact cosines over vectors of unit norm: of 50,000 in 8 ms, of 200,000 in 26 ms. One thread at a time.

    A cosine is the same to the last bit whatever other vectors are indexed.
    """

    def __init__(self, ids: NDArray[np.int64], vectors: Vectors) -> None:
        """ids: (n,), ascending; vectors: (n, dimensions)."""
        self.ids = ids
        self._vectors = vectors

    def update(self, ids: NDArray[np.int64], new_ids: NDArray[np.int64], vectors: Vectors) -> None:
        """Keep only these ids, and add vectors with ids that are greater than all before."""
        kept = np.isin(self.ids, ids, assume_unique=True)
        if len(new_ids) or not kept.all():
            self.ids = np.concatenate((self.ids[kept], new_ids))
            self._vectors = np.concatenate((self._vectors[kept], vectors))

    def search(
        self, vector: NDArray[np.float32], k: int, allowed: NDArray[np.int64] | None = None
    ) -> list[tuple[int, float]]:
        """At most k pairs (id, cosine), best first, the lower id among equals. allowed: only these ids; None: all."""
        rows = np.arange(len(self.ids)) if allowed is None else np.flatnonzero(np.isin(self.ids, allowed))
        if 2 * len(rows) < len(self.ids):
            cosines = np.vecdot(self._vectors[rows], vector)
        else:
            cosines = np.vecdot(self._vectors, vector)[rows]
        best = np.argpartition(-cosines, k)[:k] if k < len(rows) else np.arange(len(rows))
        best = best[np.lexsort((rows[best], -cosines[best]))]
        return [(int(self.ids[row]), float(cosine)) for row, cosine in zip(rows[best], cosines[best], strict=True)]

    def cosine(self, vector: NDArray[np.float32], chunk_id: int) -> float:
        """Of one chunk; -1 for one that is not indexed, such as a damaged one."""
        row = int(np.searchsorted(self.ids, chunk_id))
        found = row < len(self.ids) and self.ids[row] == chunk_id
        return float(np.vecdot(self._vectors[row], vector)) if found else -1.0


class VectorRows:
    """Exact cosines by pgvector, over the rows themselves, so that no server holds all vectors: of 50,000 in 48 ms."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def search(self, vector: NDArray[np.float32], k: int, selection: Selection) -> list[tuple[int, float]]:
        """As `VectorIndex.search`, of what is selected."""
        where, parameters = selected_rows(selection)
        rows = self._database.execute(
            f"SELECT id, cosine FROM (SELECT chunks.id, -(embedding <#> ?::vector) AS cosine FROM {FROM} {where}) "
            "AS found ORDER BY cosine DESC, id LIMIT ?",
            written(vector), *parameters, k,
        )  # fmt: skip
        return [(int(chunk_id), float(cosine)) for chunk_id, cosine in rows]

    def cosines(self, vector: NDArray[np.float32], chunk_ids: Sequence[int]) -> dict[int, float]:
        marks = ", ".join("?" * len(chunk_ids))
        select = f"SELECT id, -(embedding <#> ?::vector) FROM chunks WHERE id IN ({marks})"
        return dict(self._database.execute(select, written(vector), *chunk_ids)) if chunk_ids else {}


class HybridIndex:
    """The vectors of a whole store and the word indexes of recently searched collections. One thread at a time."""

    def __init__(self, database: Database, dimensions: int) -> None:
        self._database = database
        self._dimensions = dimensions
        self._vector_index = VectorIndex(np.empty(0, np.int64), np.empty((0, dimensions), np.float32))
        self._vector_rows = VectorRows(database) if database.is_shared else None  # in place of the index
        self._ids: dict[Selection, NDArray[np.int64]] = {}  # of whole collections and more, until the next change
        # Of each selection its own, so that the content of others does not affect its ranks; rebuilt after changes;
        # last used last.
        self._words: dict[Selection, BM25Index] = {}
        self._stamp = ""  # store and generation of the rows that the vector index was built from

    def refresh(self) -> None:
        """Apply changes of the rows. Raises ConfigError when the store was meanwhile indexed with another embedder."""
        meta = self._database.meta()
        self._database.check_embedder(meta)
        stamp = stamp_of(meta)
        if stamp == self._stamp:
            return
        database, dimensions, known = self._database, self._dimensions, self._vector_index.ids
        if self._vector_rows is not None:
            pass
        elif self._stamp.startswith(meta["store"]):
            ids = np.fromiter((row[0] for row in database.execute("SELECT id FROM chunks")), np.int64)
            last = int(known[-1]) if len(known) else 0  # ids only grow
            self._vector_index.update(ids, *read_vectors(database, dimensions, "WHERE chunks.id > ?", last))
        else:
            self._vector_index = VectorIndex(*read_vectors(database, dimensions, ""))
        self._stamp = stamp
        self._ids.clear()

    def selected(self, selection: Selection) -> NDArray[np.int64]:
        """(n,) ids of the chunks in a selection."""
        is_kept = selection.document_ids is None
        if is_kept and selection in self._ids:
            return self._ids[selection]
        where, parameters = selected_rows(selection)
        rows = self._database.execute(f"SELECT chunks.id FROM {FROM} {where} ORDER BY chunks.id", *parameters)
        ids = np.fromiter((row[0] for row in rows), np.int64)
        if is_kept:
            for oldest in list(self._ids)[: 1 - _MAX_CACHED]:
                del self._ids[oldest]
            self._ids[selection] = ids
        return ids

    def candidates(
        self, query: str, vector: NDArray[np.float32], limit: int, selection: Selection, selected: NDArray[np.int64]
    ) -> tuple[list[tuple[int, float]], float]:
        """Pairs (chunk id, score), best first, exact hits of the words before all others (see `_scored`), from at most
        `limit` hits of each kind of search; and an upper bound of the cosines of all other chunks.

        selected: `self.selected(selection)`.
        """
        if self._vector_rows is not None:
            found = self._vector_rows.search(vector, limit, selection)
        else:
            is_whole = len(selected) == len(self._vector_index.ids)
            found = self._vector_index.search(vector, limit, None if is_whole else selected)
        others = found[-1][1] if found and len(found) == limit < len(selected) else -math.inf
        scores = dict(found)
        index = self._word_index(replace(selection, document_ids=None))
        if index is None:
            return found, others
        hits = index.search(query, limit, None if selection.document_ids is None else set(selected.tolist()))
        named = {hit.id for hit in hits if hit.is_named}
        exact = named | {hit.id for hit in hits if hit.is_exact}
        fused = rank_fusion(list(scores), [hit.id for hit in hits])
        others_hit = [i for i in fused if i not in scores]
        if self._vector_rows is not None:
            by_words = self._vector_rows.cosines(vector, others_hit)
        else:
            by_words = {i: self._vector_index.cosine(vector, i) for i in others_hit}
        cosines = {i: scores[i] if i in scores else by_words[i] for i in fused}
        near = max(cosines.values(), default=0.0) - _NEAR_TIE
        telling = {hit.id: hit.num_telling for hit in hits if hit.num_telling and cosines[hit.id] >= near}
        order = sorted(fused, key=lambda i: (i not in named, i not in exact, -telling.get(i, 0)))
        leading = {hit.id for hit in hits if hit.is_leading} - exact - telling.keys()
        scored = _scored([(i, cosines[i]) for i in order], exact, telling.keys(), leading)
        beside = max((score for i, score in scored if i not in named), default=-1.0) + _NAMED_LEAD
        return [(i, max(score, beside) if i in named else score) for i, score in scored], others

    def _word_index(self, selection: Selection) -> BM25Index | None:
        """The BM25 index of whole collections, without what is barred, whose words would show in the ranks of others;
        None where they have more than MAX_ROWS chunks."""
        ids = self.selected(selection)
        known = self._words.pop(selection, None)
        if known is None or not np.array_equal(known.ids, ids):  # ids are never reused: equal ids mean equal texts
            if len(ids) > MAX_ROWS:
                return None
            where, parameters = selected_rows(selection)
            passages = read_passages(self._database, where, *parameters)
            found = {passage.chunk_id: passage.titled for passage in passages}
            known = BM25Index(ids, [found.get(chunk_id, "") for chunk_id in ids.tolist()])
        self._words[selection] = known
        for oldest in list(self._words)[:-_MAX_CACHED]:
            del self._words[oldest]
        return known


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


def stamp_of(meta: Mapping[str, str]) -> str:
    """What changes with every change of documents, by any process; its beginning with every change of all vectors."""
    return f"{meta['store']} {meta['generation']}"


def selected_rows(selection: Selection) -> tuple[str, list[object]]:
    """SQL after the table of documents, joined with their chunks or not, for what is selected; and its parameters."""
    where = f"WHERE collection IN ({', '.join('?' * len(selection.collections))})"
    parameters: list[object] = list(selection.collections)
    for ids, condition in ((selection.document_ids, "IN"), (selection.barred or None, "NOT IN")):
        if ids is not None:
            where += f" AND documents.id {condition} (SELECT value FROM json_each(?))"
            parameters.append(json.dumps(sorted(ids)))
    return where, parameters
