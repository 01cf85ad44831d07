"""Word search (BM25, Robertson et al. 1994, by bm25s), and its fusion with the search by vectors.

Finds names and numbers that embeddings blur. Reciprocal ranks decide the order (Cormack et al. 2009), but a chunk that
holds what is rare in the query comes before all that do not: ranks alone weigh the one exact hit like the best of many
near ties. Words and their spellings: `core.words`. Held in memory and rebuilt as a whole: 10,000 chunks take 1.5 s.
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

from paceline.core.words import Words

if TYPE_CHECKING:  # else where the first text is indexed: SciPy, which it imports, is a twentieth of a start
    import bm25s  # type: ignore[import-untyped]  # it ships no types

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

    def __init__(self, ids: Sequence[int], texts: Sequence[str]) -> None:
        self._ids = ids
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
        chosen = islice((place for place in best if allowed is None or self._ids[place] in allowed), k)
        return [
            WordHit(
                self._ids[place],
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
        num_chunks = len(self._ids)
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
        named, telling = np.zeros((2, len(self._ids)), np.int64)
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
        return max(_RARE_CHUNKS, _RARE_SHARE * len(self._ids))

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
    return [word for word in words.words() if word not in stop]


@cache
def _stop_words() -> frozenset[str]:
    from bm25s.stopwords import STOPWORDS_EN  # type: ignore[import-untyped]  # it ships no types

    return frozenset(STOPWORDS_EN)
