"""The block manager against a model in which every sequence is a list of values."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.batching.block_manager import BlockCopy, BlockManager, OutOfBlocks
from paceline.core.batching.segment import SeqId

TOTAL, SIZE = 7, 3
ids = st.integers(0, 4).map(SeqId)


class BlockManagerMachine(RuleBasedStateMachine):
    """Writes values through the slot mapping and performs the copies; every row must read as it was written."""

    max_unused: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(TOTAL, SIZE, self.max_unused)
        self.memory = np.full(TOTAL * SIZE, -1)
        self.model: dict[SeqId, list[int]] = {}
        self.written = 0
        self.contents: list[list[bytes]] = []  # chains of hashes that were registered

    def copy(self, copies: list[BlockCopy]) -> None:
        for source, target, rows in copies:
            self.memory[target * SIZE : target * SIZE + rows] = self.memory[source * SIZE : source * SIZE + rows]

    def write(self, seq: SeqId, start: int, stop: int) -> None:
        for row, slot in zip(range(start, stop), self.manager.slot_mapping(seq, start, stop), strict=True):
            self.written += 1
            self.memory[slot] = self.model[seq][row] = self.written

    def tables(self) -> dict[SeqId, tuple[int, ...]]:
        return {seq: self.manager.block_table(seq) for seq in self.model}

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

    @rule(seq=ids, into=ids)
    def fork(self, seq: SeqId, into: SeqId) -> None:
        if seq not in self.model or into in self.model:
            with pytest.raises(ValueError, match="fork"):
                self.manager.fork(seq, into)
            return
        free = self.manager.free_rows()
        self.manager.fork(seq, into)
        assert self.manager.free_rows() == free
        self.model[into] = list(self.model[seq])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[seq])))
        self.manager.truncate(seq, length)
        del self.model[seq][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        """Overwrite rows like a commit, which moves rows of a tree to the front."""
        seq = data.draw(st.sampled_from(sorted(self.model)))
        start = data.draw(st.integers(0, len(self.model[seq])))
        stop = data.draw(st.integers(start, len(self.model[seq])))
        try:
            self.copy(self.manager.unshare(seq, start, stop))
        except OutOfBlocks:
            return
        self.write(seq, start, stop)

    @rule(seq=ids)
    def release(self, seq: SeqId) -> None:
        self.manager.release(seq)
        self.model.pop(seq, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        """Every full block of a sequence, under a name that says the content of all rows up to its end."""
        seq = data.draw(st.sampled_from(sorted(self.model)))
        rows = self.model[seq]
        hashes = [repr(rows[:end]).encode() for end in range(SIZE, len(rows) + 1, SIZE)]
        for place, content in enumerate(hashes):
            self.manager.register(seq, place, content)
        if hashes:
            self.contents.append(hashes)

    @precondition(lambda self: self.contents)
    @rule(seq=ids, data=st.data())
    def adopt(self, seq: SeqId, data: st.DataObject) -> None:
        hashes = data.draw(st.sampled_from(self.contents))
        if seq in self.model:
            with pytest.raises(ValueError, match="exists"):
                self.manager.adopt(seq, hashes)
            return
        free, known = self.manager.free_rows(), self.manager.num_cached(hashes)
        rows = self.manager.adopt(seq, hashes)
        assert rows == known * SIZE and free - rows <= self.manager.free_rows() <= free
        if rows:
            self.model[seq] = ast.literal_eval(hashes[known - 1].decode())

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


def test_a_fork_shares_blocks_and_copies_the_partial_one_when_it_writes() -> None:
    manager = BlockManager(4, 4)
    assert manager.reserve(SeqId(1), 6) == []
    manager.fork(SeqId(1), SeqId(2))
    assert manager.block_table(SeqId(1)) == manager.block_table(SeqId(2)) == (0, 1)
    assert manager.reserve(SeqId(2), 1) == [BlockCopy(1, 2, 2)]
    assert manager.block_table(SeqId(2)) == (0, 2)
    assert manager.reserve(SeqId(1), 1) == []  # not shared any more
    assert manager.slot_mapping(SeqId(2), 3, 7).tolist() == [3, 8, 9, 10]


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    manager = BlockManager(3, 4)
    manager.reserve(SeqId(1), 4)
    manager.fork(SeqId(1), SeqId(2))
    assert manager.reserve(SeqId(2), 1) == []


def test_truncating_into_a_shared_block_copies_only_the_remaining_rows() -> None:
    manager = BlockManager(4, 4)
    manager.reserve(SeqId(1), 8)
    manager.fork(SeqId(1), SeqId(2))
    manager.truncate(SeqId(2), 5)
    assert manager.reserve(SeqId(2), 2) == [BlockCopy(1, 2, 1)]


def test_out_of_blocks_names_the_numbers_and_changes_nothing() -> None:
    manager = BlockManager(2, 4)
    manager.reserve(SeqId(1), 5)
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 of 2 are free"):
        manager.reserve(SeqId(2), 1)
    assert manager.length(SeqId(2)) == 0
    assert manager.reserve(SeqId(1), 3) == []  # the rest of its last block is its own


def test_a_copy_without_a_free_block_is_out_of_blocks() -> None:
    manager = BlockManager(1, 4)
    manager.reserve(SeqId(1), 2)
    manager.fork(SeqId(1), SeqId(2))
    for act in (lambda: manager.reserve(SeqId(2), 1), lambda: manager.unshare(SeqId(1), 0, 1)):
        with pytest.raises(OutOfBlocks):
            act()
        manager.check()
    assert (manager.length(SeqId(2)), manager.block_table(SeqId(2))) == (2, (0,))


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0)])
def test_a_manager_without_rows_is_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match="needs blocks"):
        BlockManager(total, size)


def test_rows_never_reserved_are_refused() -> None:
    manager = BlockManager(2, 4)
    manager.reserve(SeqId(1), 2)
    for act in (
        lambda: manager.slot_mapping(SeqId(1), 0, 3),
        lambda: manager.truncate(SeqId(1), 3),
        lambda: manager.unshare(SeqId(2), 0, 1),
        lambda: manager.reserve(SeqId(1), -1),
    ):
        with pytest.raises(ValueError, match="row"):
            act()
    manager.truncate(SeqId(9), 0)  # an unknown sequence has length 0
    assert manager.slot_mapping(SeqId(9), 0, 0).tolist() == []


def named(manager: BlockManager, seq: int, *names: bytes) -> None:
    for place, name in enumerate(names):
        manager.register(SeqId(seq), place, name)


def test_a_registered_prefix_is_adopted_after_its_sequence_has_ended() -> None:
    manager = BlockManager(4, 4)
    manager.reserve(SeqId(1), 9)
    named(manager, 1, b"a", b"ab")
    manager.release(SeqId(1))
    assert manager.free_rows() == 16, "what no sequence uses can be allocated"
    assert manager.adopt(SeqId(2), [b"a", b"ab", b"abc"]) == 8
    assert manager.block_table(SeqId(2)) == (0, 1) and manager.free_rows() == 8
    assert manager.adopt(SeqId(3), [b"a", b"ax"]) == 4, "shared while both live"
    assert manager.free_rows() == 8


def test_unused_blocks_are_evicted_when_nothing_else_is_free_the_end_of_the_oldest_prefix_first() -> None:
    manager = BlockManager(4, 4)
    for seq, names in ((1, (b"a", b"ab")), (2, (b"x", b"xy"))):
        manager.reserve(SeqId(seq), 8)
        named(manager, seq, *names)
        manager.release(SeqId(seq))
    manager.reserve(SeqId(3), 4)
    assert (manager.num_cached([b"a", b"ab"]), manager.num_cached([b"x", b"xy"])) == (1, 2)
    manager.reserve(SeqId(3), 4)
    assert (manager.num_cached([b"a", b"ab"]), manager.num_cached([b"x", b"xy"])) == (0, 2)


def test_with_a_limit_of_unused_blocks_many_prompts_touch_few_blocks() -> None:
    """A block is memory from its first use on: prompts that come one after the other need no more than the limit."""
    manager = BlockManager(1000, 4, max_unused=6)
    touched: set[int] = set()
    for number in range(200):
        manager.reserve(SeqId(number), 9)
        named(manager, number, b"%d" % number, b"%d next" % number)
        touched.update(manager.block_table(SeqId(number)))
        manager.release(SeqId(number))
        manager.check()
    assert len(touched) <= 6 + 3
    cached = [manager.num_cached([b"%d" % number, b"%d next" % number]) for number in range(196, 200)]
    assert cached == [0, 2, 2, 2]
    assert manager.reserve(SeqId(1000), 4000) == [], "all memory is there for answers"
    assert manager.num_cached([b"199"]) == 0


def test_a_registered_block_that_is_written_again_loses_its_name() -> None:
    manager = BlockManager(2, 4)
    manager.reserve(SeqId(1), 4)
    named(manager, 1, b"a")
    manager.truncate(SeqId(1), 2)
    manager.reserve(SeqId(1), 1)
    assert manager.num_cached([b"a"]) == 0


def test_a_shared_registered_block_is_copied_before_it_is_written_and_keeps_its_name() -> None:
    manager = BlockManager(2, 4)
    manager.reserve(SeqId(1), 4)
    named(manager, 1, b"a")
    manager.adopt(SeqId(2), [b"a"])
    manager.truncate(SeqId(2), 2)
    assert manager.reserve(SeqId(2), 1) == [BlockCopy(0, 1, 2)]
    assert manager.num_cached([b"a"]) == 1
