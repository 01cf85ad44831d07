"""Names of blocks: equal for equal beginnings under one salt, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.prefix_cache import BlockHasher

texts = st.lists(st.integers(0, 3), max_size=20)
SIZE = 3


@given(texts, texts)
def test_blocks_have_one_name_if_and_only_if_all_tokens_up_to_their_end_are_equal(a: list[int], b: list[int]) -> None:
    first, second = BlockHasher("owner", SIZE, a).hashes, BlockHasher("owner", SIZE, b).hashes
    assert len(first) == len(a) // SIZE
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        assert (one == other) == (a[: (place + 1) * SIZE] == b[: (place + 1) * SIZE])


@given(texts, st.lists(texts, max_size=4), st.integers(0, 20))
def test_growing_truncating_and_forking_give_the_names_of_the_text_that_is_left(
    tokens: list[int], more: list[list[int]], length: int
) -> None:
    hasher = BlockHasher("owner", SIZE, tokens)
    hasher.truncate(length)
    kept = tokens[:length]
    fork = hasher.fork()
    for part in more:
        fork.append(part)
    assert hasher.hashes == BlockHasher("owner", SIZE, kept).hashes and len(hasher) == len(kept)
    whole = kept + [token for part in more for token in part]
    assert fork.hashes == BlockHasher("owner", SIZE, whole).hashes


def test_another_salt_gives_other_names() -> None:
    tokens = list(range(12))
    assert not set(BlockHasher("a", SIZE, tokens).hashes) & set(BlockHasher("b", SIZE, tokens).hashes)
