"""Nearest vectors, against all cosines sorted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.rag.index import VectorIndex

DIMENSIONS = 4


def vectors(ids: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A vector for each id, some of them equal."""
    made = [np.random.default_rng(each % 7).standard_normal(DIMENSIONS) for each in ids]
    return np.array(made, np.float32).reshape(len(ids), DIMENSIONS)


@given(
    first=st.sets(st.integers(1, 40)), later=st.sets(st.integers(41, 80)), gone=st.sets(st.integers(1, 40)),
    allowed=st.none() | st.sets(st.integers(1, 80)), k=st.integers(1, 90),
)  # fmt: skip
def test_a_search_finds_the_nearest_of_what_is_there_and_allowed(
    first: set[int], later: set[int], gone: set[int], allowed: set[int] | None, k: int
) -> None:
    ids = sorted(first)
    index = VectorIndex(np.array(ids, np.int64), vectors(ids))
    kept = sorted((first - gone) | later)
    new = sorted(later)
    index.update(np.array(kept, np.int64), np.array(new, np.int64), vectors(new))
    assert index.ids.tolist() == kept
    query = np.array([1, -2, 3, 0.5], np.float32)
    among = [each for each in kept if allowed is None or each in allowed]
    cosines = {each: float(np.vecdot(vectors([each])[0], query)) for each in among}
    found = index.search(query, k, None if allowed is None else np.array(sorted(allowed), np.int64))
    assert [cosine for _, cosine in found] == sorted(cosines.values(), reverse=True)[:k]
    assert all(cosines[each] == cosine == index.cosine(query, each) for each, cosine in found)
    assert index.cosine(query, 99) == -1.0
