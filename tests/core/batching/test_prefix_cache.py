"""Names of blocks: equal for equal beginnings under one salt, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.block_manager import BlockHasher

texts = st.lists(st.integers(0, 3), max_size=20)
SIZE = 3


@given(texts, texts)
def test_blocks_have_one_name_if_and_only_if_all_tokens_up_to_their_end_are_equal(a: list[int], b: list[int]) -> None:
    first, second = BlockHasher("owner", SIZE, a), BlockHasher("owner", SIZE, b)
    assert len(first.full) == len(a) // SIZE and len(first.names) == -(-len(a) // SIZE)
    for place, (one, other) in enumerate(zip(first.names, second.names, strict=False)):
        begin, end = place * SIZE, (place + 1) * SIZE
        assert (one.content == other.content) == (a[:end] == b[:end])
        assert (one.before == other.before) == (a[:begin] == b[:begin])
        assert one.rows == len(a[begin:end])


@given(texts, st.lists(texts, max_size=4), st.integers(0, 20))
def test_growing_and_truncating_give_the_names_of_the_text_that_is_left(
    tokens: list[int], more: list[list[int]], length: int
) -> None:
    hasher = BlockHasher("owner", SIZE, tokens)
    hasher.truncate(length)
    kept = tokens[:length]
    assert hasher.names == BlockHasher("owner", SIZE, kept).names and len(hasher) == len(kept)
    for part in more:
        hasher.append(part)
    whole = kept + [token for part in more for token in part]
    assert hasher.names == BlockHasher("owner", SIZE, whole).names


def test_another_salt_gives_other_names() -> None:
    tokens = list(range(12))
    first, second = (BlockHasher(salt, SIZE, tokens).full for salt in "ab")
    assert not {name.content for name in first} & {name.content for name in second}
    assert first[0].before != second[0].before, "not even a beginning is found"
