"""Word search (BM25, Robertson et al. 1994, by bm25s), and its fusion with the search by vectors.

Finds names and numbers that embeddings blur. Reciprocal ranks decide the order (Cormack et al. 2009), but a chunk that
holds what is rare in the query comes before all that do not: ranks alone weigh the one exact hit like the best of many
near ties. Held in memory and rebuilt as a whole: 10,000 chunks take 0.6 s.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # else where the first text is indexed: SciPy, which it imports, is a twentieth of a start
    import bm25s  # type: ignore[import-untyped]  # it ships no types

MAX_ROWS = 20_000  # above, order is by cosine alone, since a rebuild after each change would take seconds
_WORD = re.compile(r"\w+")
_RANK_OFFSET = 10  # damps the lead of the first ranks; 5 to 60 gave the same within 1 %
_RARE_SHARE = 0.002  # of the chunks, which may hold a rare word; and always as many as _RARE_CHUNKS
_RARE_CHUNKS = 3
_LEADING = 2
_EXACT_WEIGHT = 0.75  # of the query's words by their weight, that an exact hit holds


@dataclass(frozen=True, slots=True)
class WordHit:
    """A chunk that shares a word with the query."""

    id: int
    is_exact: bool  # it holds nearly all of the query by weight, a rare word among it
    is_leading: bool  # it is one of the first _LEADING, and holds a rare word of the query


class BM25Index:
    """BM25 over a fixed set of chunks."""

    def __init__(self, ids: Sequence[int], texts: Sequence[str]) -> None:
        self._ids = ids
        self._index: bm25s.BM25 | None = None
        corpus = [_words(text) for text in texts]
        if any(corpus):
            import bm25s

            logging.getLogger("bm25s").setLevel(logging.WARNING)  # when imported it asks for all of its messages
            self._index = bm25s.BM25()
            self._index.index(corpus, show_progress=False)

    def search(self, query: str, k: int, allowed: Container[int] | None = None) -> list[WordHit]:
        """At most k chunks that share a word with the query, best first. `allowed`: only these ids; None: all."""
        if self._index is None or not (words := _words(query)):
            return []
        scores = self._index.get_scores(words)
        exact, rare = self._exact(self._index, set(words))
        best = (place for place in np.argsort(-scores, kind="stable").tolist() if scores[place] > 0)
        chosen = islice((place for place in best if allowed is None or self._ids[place] in allowed), k)
        return [
            WordHit(self._ids[place], bool(exact[place]), rank < _LEADING and bool(rare[place]))
            for rank, place in enumerate(chosen)
        ]

    def _exact(self, index: bm25s.BM25, words: set[str]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(chunks,) whether each holds nearly all of these words by weight, and a rare one among them; and whether it
        holds a rare one."""
        num_chunks = len(self._ids)
        held_weight, has_rare, whole = np.zeros(num_chunks), np.zeros(num_chunks, np.bool_), 0.0
        for word in words:
            holds = index.get_scores([word]) > 0 if word in index.vocab_dict else np.zeros(num_chunks, np.bool_)
            number = int(holds.sum())
            # As BM25 weighs a word; one that no chunk holds weighs most.
            weight = math.log1p((num_chunks - number + 0.5) / (number + 0.5))
            whole += weight
            held_weight[holds] += weight
            if number <= max(_RARE_CHUNKS, _RARE_SHARE * num_chunks):
                has_rare |= holds
        return has_rare & (held_weight >= _EXACT_WEIGHT * whole), has_rare


def rank_fusion(*rankings: Sequence[int]) -> list[int]:
    """Reciprocal rank fusion; ties go to the item seen first."""
    weight: dict[int, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking):
            weight[item] = weight.get(item, 0.0) + 1 / (_RANK_OFFSET + rank)
    return sorted(weight, key=weight.__getitem__, reverse=True)


def _words(text: str) -> list[str]:
    stop = _stop_words()
    return [word for word in _WORD.findall(text.lower()) if word not in stop]


@cache
def _stop_words() -> frozenset[str]:
    from bm25s.stopwords import STOPWORDS_EN  # type: ignore[import-untyped]  # it ships no types

    return frozenset(STOPWORDS_EN)
