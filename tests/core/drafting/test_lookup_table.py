"""Look-up tables: falling rows, add and replacement, capacity, and reads of whole rows only."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.drafting.lookup_table import BIGRAM_KEYS, NUM_SUCCESSORS, LookupTable, bigram_key
from tests.core.tables import check

VOCAB = 12
DISTS = st.dictionaries(
    st.integers(0, VOCAB - 1), st.floats(2.0**-7, 1.0, width=32), min_size=1, max_size=NUM_SUCCESSORS
)
WRITES = st.lists(st.tuples(st.integers(0, VOCAB - 1), DISTS), max_size=30)


def record(table: LookupTable, token: int, dist: dict[int, float]) -> None:
    table.record(token, list(dist), list(dist.values()))


@given(WRITES)
def test_a_row_is_the_last_dist(writes: list[tuple[int, dict[int, float]]]) -> None:
    table, model = LookupTable(VOCAB), dict[int, dict[int, float]]()
    for token, dist in writes:
        record(table, token, dist)
        model[token] = dist
        check(table)
    for token in range(VOCAB):
        ids, probs = table.successors(token)
        assert sorted(model.get(token, {}).values(), reverse=True) == probs
        assert dict(zip(ids, probs, strict=True)) == model.get(token, {})
    assert len(table) == len(model)


@pytest.mark.parametrize("negligible", [1e-39, 1e-46, 1e-60])
def test_a_probability_below_float32_is_dropped(negligible: float) -> None:
    table = LookupTable(VOCAB)
    table.record(1, [7, 8], [0.5, negligible])
    table.blend(3, [7, 8], [0.5, negligible], 0.25)
    table.harvest(np.array([4]), np.array([[8, 7]]), np.array([[negligible, 0.5]]))
    for token in (1, 3, 4):
        assert table.successors(token) == ([7], [0.5])
    check(table)


@given(st.lists(st.tuples(st.integers(0, VOCAB - 1), DISTS), min_size=1, max_size=20), st.integers(1, VOCAB))
def test_harvesting_is_overwriting_in_order(rows: list[tuple[int, dict[int, float]]], capacity: int) -> None:
    one, many = LookupTable(VOCAB), LookupTable(VOCAB)
    ids, probs = np.full((len(rows), NUM_SUCCESSORS), -1, np.int32), np.zeros((len(rows), NUM_SUCCESSORS), np.float32)
    for i, (token, dist) in enumerate(rows):
        ordered = sorted(dist.items(), key=lambda item: -item[1])
        ids[i, : len(dist)], probs[i, : len(dist)] = zip(*ordered, strict=True)
        record(one, token, dict(ordered))
    tokens = np.array([token for token, _ in rows])
    many.harvest(tokens, ids, probs)
    check(many)
    assert [many.successors(token) for token in range(VOCAB)] == [one.successors(token) for token in range(VOCAB)]
    small = LookupTable(VOCAB, capacity=capacity)
    small.harvest(tokens, ids, probs)
    check(small)
    assert len(small) == min(capacity, len(set(tokens.tolist())))
    assert small.successors(rows[-1][0]) == one.successors(rows[-1][0])


@given(WRITES)
def test_a_saved_table_is_the_same_table(writes: list[tuple[int, dict[int, float]]]) -> None:
    table = LookupTable(VOCAB)
    for token, dist in writes:
        record(table, token, dist)
    again = LookupTable(VOCAB)
    again.load(table.arrays())
    check(again)
    assert [again.successors(token) for token in range(VOCAB)] == [table.successors(token) for token in range(VOCAB)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", np.array([VOCAB], np.int32)),
        ("tokens", np.array([-1], np.int32)),
        ("tokens", np.array([1, 2], np.int32)),
        ("tokens", np.array([1], np.int64)),
        ("ids", np.full((1, NUM_SUCCESSORS), VOCAB, np.int32)),
        ("ids", np.full((1, NUM_SUCCESSORS), 3, np.int32)),
        ("ids", np.zeros((1, NUM_SUCCESSORS + 1), np.int32)),
        ("probs", np.full((1, NUM_SUCCESSORS), np.nan, np.float32)),
        ("probs", np.full((1, NUM_SUCCESSORS), 2.0, np.float32)),
        ("probs", None),
    ],
)
def test_invalid_arrays_are_refused(name: str, value: np.ndarray | None) -> None:
    table = LookupTable(VOCAB)
    table.record(1, [2, 3], [0.5, 0.25])
    arrays = table.arrays()
    if name == "ids":
        arrays["probs"] = np.full((1, NUM_SUCCESSORS), 0.1, np.float32)
    if value is None:
        del arrays[name]
    else:
        arrays[name] = value
    with pytest.raises(ValueError):  # each has its own message
        LookupTable(VOCAB).load(arrays)


def test_a_table_over_another_reads_it_and_never_writes_it() -> None:
    base = LookupTable(VOCAB)
    base.record(1, [2], [0.5])
    table = LookupTable(VOCAB, base=base)
    assert table.successors(1) == ([2], [0.5]) and len(table) == 0
    table.record(1, [3], [0.25])
    assert table.successors(1) == ([3], [0.25])
    assert base.successors(1) == ([2], [0.5])
    table.erase()
    assert table.successors(1) == ([2], [0.5]) and len(table) == 0


def test_a_bounded_table_evicts_the_least_recently_written_row() -> None:
    table = LookupTable(VOCAB, capacity=3)
    for token in (0, 1, 2):
        table.record(token, [9], [0.5])
    table.record(3, [9], [0.5])  # all are marked as written: the first is evicted, the others lose their mark
    assert table.successors(0) == ([], [])
    table.record(1, [9], [0.75])
    table.record(4, [9], [0.5])
    check(table)
    assert table.successors(1) == ([9], [0.75]) and table.successors(2) == ([], [])
    assert len(table) == 3


def test_a_full_table_takes_less_than_twelve_bytes_per_entry() -> None:
    vocab = 5000
    table = LookupTable(vocab)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(vocab, NUM_SUCCESSORS, replace=False) for _ in range(vocab)])
    table.harvest(np.arange(vocab), ids, rng.random((vocab, NUM_SUCCESSORS)))
    assert len(table) == vocab
    assert sum(array.nbytes for array in table.arrays().values()) < 12 * vocab * NUM_SUCCESSORS


def test_a_reader_beside_the_writer_sees_whole_rows_only() -> None:
    table, stop = LookupTable(64, capacity=16), threading.Event()
    torn: list[tuple[list[int], list[float]]] = []

    def read() -> None:
        while not stop.is_set():
            for token in range(64):
                ids, probs = table.successors(token)
                if ids and (len({i % 4 for i in ids}) > 1 or len(set(probs)) > 1 or probs[0] != (ids[0] % 4 + 1) / 8):
                    torn.append((ids, probs))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(400):
        kind = step % 4
        ids = [kind + 4 * i for i in range(NUM_SUCCESSORS)]
        table.record(step * 7 % 64, ids, [(kind + 1) / 8] * NUM_SUCCESSORS)
        if step % 20 == 0:
            tokens = np.arange(32)
            table.harvest(tokens, np.tile(ids, (32, 1)), np.full((32, NUM_SUCCESSORS), (kind + 1) / 8))
        if step % 100 == 99:
            table.erase()
    stop.set()
    for reader in readers:
        reader.join(10.0)
    assert not torn
    check(table)


@given(DISTS)
def test_blending_one_dist_again_and_again_gives_that_dist(dist: dict[int, float]) -> None:
    table = LookupTable(VOCAB)
    for _ in range(20):
        table.blend(1, list(dist), list(dist.values()), 0.25)
    ids, probs = table.successors(1)
    assert dict(zip(ids, probs, strict=True)) == pytest.approx(dist, rel=1e-5)


def test_bigrams_are_saved_erased_bounded_and_read_through_like_tokens() -> None:
    base = LookupTable(VOCAB, bigram_rows=4)
    assert base.bigrams is not None
    key = bigram_key(3, 5)
    base.bigrams.record(key, [2], [0.5])
    table = LookupTable(VOCAB, base=base, bigram_rows=4)
    assert table.bigrams is not None and table.bigrams.successors(key) == ([2], [0.5])
    for before in range(6):
        table.bigrams.record(bigram_key(before, 1), [before], [0.5])
    assert len(table.bigrams) == 4 and table.bigrams.successors(bigram_key(5, 1)) == ([5], [0.5])
    again = LookupTable(VOCAB, bigram_rows=4)
    again.load(table.arrays())
    check(again)
    assert again.bigrams is not None and again.bigrams.successors(bigram_key(5, 1)) == ([5], [0.5])
    table.erase()
    assert len(table.bigrams) == 0 and table.bigrams.successors(key) == ([2], [0.5])
    bad = again.arrays() | {"pair_ids": np.full((4, NUM_SUCCESSORS), VOCAB, np.int32)}
    again.record(1, [2], [0.5])
    with pytest.raises(ValueError, match="vocabulary"):
        LookupTable(VOCAB).load(bad)
    assert LookupTable(VOCAB, bigram_rows=0).bigrams is None


def test_keys_of_bigrams_are_spread_and_pinned() -> None:
    keys = {bigram_key(before, token) for before in range(100) for token in range(100)}
    assert len(keys) > 9_000 and max(keys) < BIGRAM_KEYS
    assert (bigram_key(0, 0), bigram_key(1, 2), bigram_key(151_935, 7)) == (0, 7709, 112081)
