"""Look-up tables, and the trees that are drafted from them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.baselines.lookup import AS_PUBLISHED, DrafterOptions, VariedDrafter
from paceline.core.drafting.lookup_table import BIGRAM_KEYS, NUM_SUCCESSORS, LookupTable, bigram_key
from paceline.core.drafting.ngram_drafter import NO_DRAFT, DrafterStats, DraftTree, NgramDrafter
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, sample
from tests.core.dists import from_logits
from tests.core.drafting.draft_paths import roots, text, walk
from tests.core.tables import check

VOCAB = 12
DISTS = st.dictionaries(
    st.integers(0, VOCAB - 1), st.floats(2.0**-7, 1.0, width=32), min_size=1, max_size=NUM_SUCCESSORS
)
WRITES = st.lists(st.tuples(st.integers(0, VOCAB - 1), DISTS), max_size=30)


def record(table: LookupTable, token: int, dist: dict[int, float]) -> None:
    table.record(token, list(dist), list(dist.values()))


def saved(tokens: Sequence[int], ids: np.ndarray, probs: np.ndarray) -> dict[str, np.ndarray]:
    """ids, probs: (tokens, NUM_SUCCESSORS)."""
    return {"tokens": np.array(tokens, np.int32), "ids": ids.astype(np.int32), "probs": probs.astype(np.float32)}


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
    table.load(saved([4], np.array([[8, 7, *[-1] * 6]]), np.array([[negligible, 0.5, *[0.0] * 6]])))
    for token in (1, 3, 4):
        assert table.successors(token) == ([7], [0.5])
    check(table)


@given(st.dictionaries(st.integers(0, VOCAB - 1), DISTS, min_size=1), WRITES, st.integers(1, VOCAB))
def test_loading_is_overwriting_and_a_small_table_keeps_the_last_rows(
    rows: dict[int, dict[int, float]], before: list[tuple[int, dict[int, float]]], capacity: int
) -> None:
    one, many = LookupTable(VOCAB), LookupTable(VOCAB)
    for token, dist in before:
        record(one, token, dist)
        record(many, token, dist)
    ids, probs = np.full((len(rows), NUM_SUCCESSORS), -1), np.zeros((len(rows), NUM_SUCCESSORS))
    for i, (token, dist) in enumerate(rows.items()):
        ids[i, : len(dist)], probs[i, : len(dist)] = list(dist), list(dist.values())
        record(one, token, dist)
    many.load(saved([*rows], ids, probs))
    check(many)
    assert [many.successors(token) for token in range(VOCAB)] == [one.successors(token) for token in range(VOCAB)]
    small = LookupTable(VOCAB, capacity=capacity)
    small.load(saved([*rows], ids, probs))
    check(small)
    assert len(small) == min(capacity, len(rows))
    assert all(small.successors(token) == one.successors(token) for token in [*rows][-capacity:])


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
    table.load(saved(range(vocab), ids, rng.random((vocab, NUM_SUCCESSORS))))
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
            table.load(saved(range(32), np.tile(ids, (32, 1)), np.full((32, NUM_SUCCESSORS), (kind + 1) / 8)))
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


# ---- the n-gram drafter on a Markov target --------------------------------------------------------------------------
FEW = 24
TABLE_PROBS = replace(AS_PUBLISHED, noise=False)


def markov(seed: int, sharpness: float = 2.0) -> list[Dist]:
    """A distribution after each token."""
    rows = np.random.default_rng(seed).normal(size=(FEW, FEW)) * sharpness
    return [from_logits(row) for row in rows]


def filled_table(dists: list[Dist]) -> LookupTable:
    table = LookupTable(FEW)
    for token, dist in enumerate(dists):
        ids, probs = zip(*dist.top(NUM_SUCCESSORS), strict=True)
        table.record(token, ids, probs)
    return table


def target(dists: list[Dist], params: SamplingParams, drafted: DraftTree, last: int, start: int, node: int) -> int:
    token = last if node < 0 else drafted.tokens[node]
    return sample(dists[token], params, start + len(text(drafted, node)))


def decode(
    dists: list[Dist],
    drafter: NgramDrafter,
    params: SamplingParams,
    steps: int,
    *,
    budget: int = 12,
    learn: bool = True,
) -> tuple[list[int], list[tuple[DraftTree, int]]]:
    """The output, and each step's tree and number of output tokens."""
    output, past = [0], []
    drafter.observe(0)
    for _ in range(steps):
        drafted = drafter.draft(budget, len(output))
        start = len(output)

        walked = walk(drafted, partial(target, dists, params, drafted, output[-1], start))
        for token in walked:
            drafter.observe(token)
        if learn:
            for token in drafted.tokens:
                drafter.learn(token, dists[token], accepted=False)
            drafter.learn(output[-1], dists[output[-1]], before=output[-2] if len(output) > 1 else None)
        past.append((drafted, len(walked)))
        output += walked
    return output, past


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_mean_tokens_per_step_are_one_more_than_the_expected_accepted(seed: int, budget: int) -> None:
    """On a Markov target whose rows are in the table, at temperature 1 with noise that the drafter ignores."""
    dists, steps = markov(seed), 500
    drafter = VariedDrafter(filled_table(dists), SamplingParams(seed=seed), options=TABLE_PROBS)
    _, past = decode(dists, drafter, SamplingParams(seed=seed), steps, budget=budget, learn=False)
    gained = np.array([count - 1.0 - sum(drafted.probs) for drafted, count in past])
    assert abs(gained.mean()) < 4.0 * gained.std() / math.sqrt(steps)


def test_rows_become_the_target_s_heads_and_the_output_is_the_target_s() -> None:
    dists, params = markov(1), SamplingParams(seed=5)
    table = LookupTable(FEW)
    output, _ = decode(dists, NgramDrafter(table, params), params, 100)
    plain = [0]
    while len(plain) < len(output):
        plain.append(sample(dists[plain[-1]], params, len(plain)))
    assert output == plain
    for token in set(output[:-20]):
        ids, probs = table.successors(token)
        assert ids == [i for i, _ in dists[token].top(NUM_SUCCESSORS)]
        assert probs == pytest.approx([p for _, p in dists[token].top(NUM_SUCCESSORS)], rel=1e-6)


def mean_tokens(options: DrafterOptions, temperature: float, seeds: int = 3, budget: int = 6, steps: int = 80) -> float:
    counts: list[int] = []
    for seed in range(seeds):
        dists, params, stats = markov(seed, 1.5), SamplingParams(temperature=temperature, seed=seed), DrafterStats()
        _, past = decode(
            dists,
            VariedDrafter(filled_table(dists), params, stats=stats, options=options),
            params,
            steps,
            budget=budget,
        )
        counts += [count for _, count in past]
    return float(np.mean(counts))


def test_ranking_by_the_common_noise_predicts_what_the_target_samples() -> None:
    without = mean_tokens(replace(TABLE_PROBS, probs="learnt"), 1.0)
    ranked = mean_tokens(replace(TABLE_PROBS, probs="learnt", noise=True), 1.0)
    assert ranked > 2.0 * without


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_learnt_acceptance_rates_predict_the_accepted_tokens(temperature: float) -> None:
    dists, params = markov(2), SamplingParams(temperature=temperature, seed=3)
    _, past = decode(dists, NgramDrafter(filled_table(dists), params), params, 300)
    late = past[100:]
    expected, gained = np.mean([sum(d.probs) for d, _ in late]), np.mean([count - 1.0 for _, count in late])
    assert expected == pytest.approx(gained, rel=0.15)


@pytest.mark.parametrize("bigrams", [False, True])
def test_bigrams_predict_more_than_tokens_if_the_target_depends_on_two(bigrams: bool) -> None:
    """The successor of 2 depends on the token before it; its previous successor does not help."""
    options, said = DrafterOptions(automaton=False, bigrams=bigrams), [0, 1, 2, 9, 0, 3, 2, 8, 0, 5, 2, 7] * 6
    drafter, right = VariedDrafter(LookupTable(FEW), SamplingParams(temperature=0.0), options=options), []
    for place, token in enumerate(said):
        drafter.observe(token)
        if token == 2:
            right.append(drafter.draft(1, place).tokens == (said[place + 1],))
        if place > 1:
            drafter.learn(said[place - 1], Dist.dense(np.eye(FEW)[token]), before=said[place - 2])
    assert all(right[3:]) if bigrams else sum(right) < len(right) / 2


def test_a_dist_is_learnt_for_its_own_bigram_only() -> None:
    table = LookupTable(FEW)
    assert table.bigrams is not None
    drafter = NgramDrafter(table, SamplingParams(temperature=0.0))
    for token in (0, 2, 1, 2, 5):
        drafter.observe(token)
    drafter.learn(2, Dist.dense(np.eye(FEW)[5]), before=1)
    drafter.learn(5, Dist.dense(np.eye(FEW)[7]))
    assert table.bigrams.successors(bigram_key(1, 2)) == ([5], [1.0])
    assert table.bigrams.successors(bigram_key(0, 2)) == ([], [])
    assert len(table.bigrams) == 1 and table.successors(5) == ([7], [1.0])


def test_as_in_the_paper_accepted_dists_overwrite_a_row_and_others_are_added() -> None:
    table = LookupTable(FEW)
    drafter = VariedDrafter(table, SamplingParams(), options=TABLE_PROBS)
    drafter.learn(1, Dist.dense(np.eye(FEW)[2]))
    drafter.learn(1, Dist.dense(np.eye(FEW)[3] * 0.5), accepted=False)
    assert table.successors(1) == ([2, 3], [1.0, 0.5])
    drafter.learn(1, Dist.dense(np.eye(FEW)[4]))
    assert table.successors(1) == ([4], [1.0])
    assert table.bigrams is not None and len(table.bigrams) == 0


def test_the_automaton_copies_what_the_text_repeats() -> None:
    repeated = [5, 1, 9, 3, 7, 2, 8, 4, 6, 0, 5, 1, 9]
    drafter = VariedDrafter(LookupTable(FEW), SamplingParams(temperature=0.0), options=DrafterOptions(tables=False))
    for token in repeated:
        drafter.observe(token)
    drafted = drafter.draft(6, 0)
    assert text(drafted, len(drafted) - 1) == (3, 7, 2, 8, 4, 6)
    assert list(drafted.probs) == sorted(drafted.probs, reverse=True)


def test_documents_are_drafted_from_up_to_their_end() -> None:
    drafter = NgramDrafter(LookupTable(FEW), SamplingParams(temperature=0.0))
    drafter.read([1, 2, 3])
    drafter.read([7, 8])
    for token in (9, 1, 2):
        drafter.observe(token)
    assert drafter.draft(5, 0).tokens == (3,)


def test_tables_and_automaton_share_one_tree_in_which_siblings_differ() -> None:
    table = LookupTable(FEW)
    table.record(2, [3, 6, 5], [0.6, 0.2, 0.1])
    drafter = NgramDrafter(table, SamplingParams(temperature=0.0))
    for token in (1, 2, 5, 4, 1, 2):
        drafter.observe(token)
    drafted = drafter.draft(20, 0)
    assert {drafted.tokens[node] for node in roots(drafted)} == {3, 5, 6}
    assert sum(drafted.probs[node] for node in roots(drafted)) <= 1.0


def test_nothing_is_drafted_after_eos_and_before_the_first_token() -> None:
    table = LookupTable(FEW)
    table.record(1, [2], [0.9])
    table.record(2, [3], [0.9])
    drafter = NgramDrafter(table, SamplingParams(temperature=0.0), eos_ids=frozenset({2}))
    assert drafter.draft(4, 0) == NO_DRAFT
    drafter.observe(1)
    assert drafter.draft(0, 0) == NO_DRAFT
    assert drafter.draft(4, 0).tokens == (2,)
