"""The block manager against a model in which every sequence is a list of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.batching.block_manager import BlockCopy, BlockHasher, BlockManager, BlockName, OutOfBlocks
from paceline.core.batching.segment import SeqId

TOTAL, SIZE = 7, 3
ids = st.integers(0, 4).map(SeqId)


def names_of(rows: Sequence[int], size: int = SIZE) -> list[BlockName]:
    """Names of the blocks of a text; in place of hashes they have the text itself."""

    def content(end: int) -> bytes:
        return np.asarray(rows[:end], "<i4").tobytes()

    cuts = range(0, len(rows), size)
    return [BlockName(content(at), content(at + size), content(at + size)[4 * at :]) for at in cuts]


class BlockManagerMachine(RuleBasedStateMachine):
    """Writes values through the slot mapping and performs the copies; every row must read as it was written."""

    max_unused: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(TOTAL, SIZE, self.max_unused)
        self.memory = np.full(TOTAL * SIZE, -1)
        self.model: dict[SeqId, list[int]] = {}
        self.written = 0
        self.contents: list[list[int]] = []  # rows that were registered

    def copy(self, copies: list[BlockCopy]) -> None:
        for source, target, rows in copies:
            self.memory[target * SIZE : target * SIZE + rows] = self.memory[source * SIZE : source * SIZE + rows]

    def write(self, seq: SeqId, start: int, stop: int) -> None:
        for row, slot in zip(range(start, stop), self.manager.slot_mapping(seq, start, stop), strict=True):
            self.written += 1
            self.memory[slot] = self.model[seq][row] = self.written

    def tables(self) -> dict[SeqId, tuple[int, ...]]:
        return {seq: tuple(self.manager.block_array(seq).tolist()) for seq in self.model}

    @rule(seq=ids, rows=st.integers(0, 9))
    def reserve(self, seq: SeqId, rows: int) -> None:
        start, before, free = self.manager.length(seq), self.tables(), self.manager.free_rows()
        try:
            copies = self.manager.reserve(seq, rows)
        except OutOfBlocks:
            assert free // SIZE * SIZE < rows + SIZE  # at most one more block, for a copy
            assert (self.tables(), self.manager.free_rows(), self.manager.length(seq)) == (before, free, start)
            return
        assert len(copies) <= 1
        self.copy(copies)
        self.model.setdefault(seq, []).extend([0] * rows)
        self.write(seq, start, start + rows)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[seq])))
        self.manager.truncate(seq, length)
        del self.model[seq][length:]

    @rule(seq=ids)
    def release(self, seq: SeqId) -> None:
        self.manager.release(seq)
        self.model.pop(seq, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        """The blocks of a sequence, the last one as far as it is filled."""
        seq = data.draw(st.sampled_from(sorted(self.model)))
        for place, name in enumerate(names_of(self.model[seq])):
            self.manager.register(seq, place, name)
        self.contents.append(list(self.model[seq]))

    @precondition(lambda self: self.contents)
    @rule(seq=ids, data=st.data())
    def adopt(self, seq: SeqId, data: st.DataObject) -> None:
        """The beginning of a text that was registered, and other rows after it."""
        known = data.draw(st.sampled_from(self.contents))
        wanted = [*known[: data.draw(st.integers(0, len(known)))], *[-1] * data.draw(st.integers(0, 4))]
        names = names_of(wanted)
        if seq in self.model:
            with pytest.raises(ValueError, match="exists"):
                self.manager.adopt(seq, names)
            return
        free, found = self.manager.free_rows(), self.manager.num_cached(names)
        rows, copies = self.manager.adopt(seq, names)
        assert rows == found or (rows == found // SIZE * SIZE and not copies), "without a free block no part of one"
        assert free - rows - SIZE < self.manager.free_rows() <= free and len(copies) <= 1
        self.copy(list(copies))
        if rows:
            self.model[seq] = wanted[:rows]

    @invariant()
    def every_row_reads_as_it_was_written(self) -> None:
        self.manager.check()
        for seq, rows in self.model.items():
            assert self.manager.length(seq) == len(rows)
            assert self.memory[self.manager.slot_mapping(seq, 0, len(rows))].tolist() == rows

    def teardown(self) -> None:
        for seq in list(self.model):
            self.manager.release(seq)
        self.manager.check()
        assert self.manager.free_rows() == TOTAL * SIZE


class SmallCacheMachine(BlockManagerMachine):
    max_unused = 2


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestSmallCache = SmallCacheMachine.TestCase
TestSmallCache.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_out_of_blocks_names_the_numbers_and_changes_nothing() -> None:
    manager = BlockManager(2, 4)
    manager.reserve(SeqId(1), 5)
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 of 2 are free"):
        manager.reserve(SeqId(2), 1)
    assert manager.length(SeqId(2)) == 0
    assert manager.reserve(SeqId(1), 3) == []  # the rest of its last block is its own


def test_rows_never_reserved_are_refused() -> None:
    manager = BlockManager(2, 4)
    manager.reserve(SeqId(1), 2)
    for act in (
        lambda: manager.slot_mapping(SeqId(1), 0, 3),
        lambda: manager.truncate(SeqId(1), 3),
        lambda: manager.reserve(SeqId(1), -1),
    ):
        with pytest.raises(ValueError, match="row"):
            act()
    manager.truncate(SeqId(9), 0)  # an unknown sequence has length 0
    assert manager.slot_mapping(SeqId(9), 0, 0).tolist() == []


A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]  # blocks of four


def hold(manager: BlockManager, seq: int, rows: Sequence[int]) -> None:
    """A sequence of these rows, with names."""
    manager.reserve(SeqId(seq), len(rows))
    for place, name in enumerate(names_of(rows, 4)):
        manager.register(SeqId(seq), place, name)


def cached(manager: BlockManager, rows: Sequence[int]) -> int:
    return manager.num_cached(names_of(rows, 4))


def test_of_a_block_that_begins_alike_the_common_rows_are_copied() -> None:
    manager = BlockManager(7, 4)
    hold(manager, 1, [*A, *B])
    assert manager.adopt(SeqId(2), names_of([*A, 5, 6, 0, 0], 4)) == (6, (BlockCopy(1, 2, 2),))
    assert manager.block_array(SeqId(2)).tolist() == [0, 2] and manager.reserve(SeqId(2), 2) == []
    assert cached(manager, [*A, *B]) == 8, "that it was copied from stays"
    assert cached(manager, [0, 6]) == 0, "the first row differs"
    hold(manager, 3, [*A, 5, 6, 7, 0])
    assert manager.num_cached(names_of([*A, 5, 6, 7, 1], 4)) == 7, "the longest of several beginnings is taken"


def test_unused_blocks_are_evicted_when_nothing_else_is_free_the_end_of_the_oldest_prefix_first() -> None:
    manager = BlockManager(4, 4)
    for seq, rows in ((1, [*A, *B]), (2, [*C, *B])):
        hold(manager, seq, rows)
        manager.release(SeqId(seq))
    manager.reserve(SeqId(3), 4)
    assert (cached(manager, [*A, *B]), cached(manager, [*C, *B])) == (4, 8)
    manager.reserve(SeqId(3), 4)
    assert (cached(manager, [*A, *B]), cached(manager, [*C, *B])) == (0, 8)


def test_with_a_limit_of_unused_blocks_many_prompts_touch_few_blocks() -> None:
    """A block is memory from its first use on: prompts that come one after the other need no more than the limit."""
    manager = BlockManager(1000, 4, max_unused=6)
    touched: set[int] = set()
    for number in range(200):
        hold(manager, number, [number] * 8)
        manager.reserve(SeqId(number), 1)
        touched.update(manager.block_array(SeqId(number)).tolist())
        manager.release(SeqId(number))
        manager.check()
    assert len(touched) <= 6 + 3
    assert [cached(manager, [number] * 8) for number in range(196, 200)] == [0, 8, 8, 8]
    assert manager.reserve(SeqId(1000), 4000) == [], "all memory is there for answers"
    assert cached(manager, [199] * 8) == 0


# ---- names of blocks: equal for equal beginnings under one salt, and for nothing else -------------------------------
texts = st.lists(st.integers(0, 3), max_size=20)


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
