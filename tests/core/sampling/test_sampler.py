"""Distributions, common noise, sampling from them, and stop strings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from paceline.core.sampling.dist import (
    GROUP,
    Dist,
    best_indices,
    contenders,
    group_minima,
    gumbel,
    gumbel_of,
    gumbel_rows,
    row_keys,
    token_ids,
    uniform,
)
from paceline.core.sampling.sampler import (
    SamplingDefaults,
    SamplingParams,
    apply_mask,
    filter_top,
    process_logits,
    sample,
)
from paceline.runtime.sessions.output_text import StopStrings
from tests.core.chi_square import assert_drawn_from
from tests.core.dists import from_logits


def sparse(probs: dict[int, float], tail: float = 0.0) -> Dist:
    return Dist(np.array(sorted(probs), dtype=np.int32), np.array([probs[i] for i in sorted(probs)]), tail)


def test_ids_of_a_vocabulary_are_one_read_only_array() -> None:
    assert token_ids(7) is Dist.dense(np.full(7, 1 / 7)).ids
    with pytest.raises(ValueError, match="read-only"):
        token_ids(7)[0] = 3


def test_probability_of_a_token_dense_and_sparse() -> None:
    dense = Dist.dense(np.array([0.25, 0.75]))
    assert [dense.prob(i) for i in (-1, 0, 1, 2)] == [0.0, 0.25, 0.75, 0.0]
    few = sparse({3: 0.5, 9: 0.25}, tail=0.25)
    assert [few.prob(i) for i in (0, 3, 4, 9, 10)] == [0.0, 0.5, 0.0, 0.25, 0.0]


def test_of_equals_the_lowest_id_comes_first() -> None:
    few = sparse({4: 0.2, 7: 0.4, 8: 0.4})
    assert few.argmax() == 7
    assert few.top(2) == [(7, 0.4), (8, 0.4)]
    assert few.top(99) == [(7, 0.4), (8, 0.4), (4, 0.2)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3000), st.integers(0, 60))
def test_best_indices_is_a_stable_falling_sort_cut_off(values: list[int], k: int) -> None:
    array = np.array(values, dtype=float)
    assert best_indices(array, k).tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def test_dropped_mass_moves_to_the_tail() -> None:
    dist = Dist.dense(np.array([0.1, 0.2, 0.3, 0.4]))
    by_mask = dist.kept(dist.probs > 0.15)
    for part in (by_mask, dist.kept_at(np.array([1, 2, 3]))):
        assert part.ids.tolist() == [1, 2, 3]
        assert math.isclose(part.tail, 0.1)
    again = by_mask.kept_at(np.array([2]))
    assert math.isclose(again.tail, 0.6)
    assert dist.kept(np.ones(4, dtype=bool)) is dist


def test_entropy_counts_the_tail_as_one_token() -> None:
    assert math.isclose(Dist.dense(np.full(8, 1 / 8)).entropy(), math.log(8))
    assert math.isclose(sparse({5: 0.5}, tail=0.5).entropy(), math.log(2))
    assert Dist.dense(np.array([1.0, 0.0])).entropy() == 0.0


# ---- common random numbers ------------------------------------------------------------------------------------------
seeds = st.integers(-(2**70), 2**70)


def back_to_uniform(noise: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-noise))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 5), (10**30, 100_000)])
def test_noise_over_ids_is_uniform(seed: int, position: int) -> None:
    u = back_to_uniform(gumbel(seed, position, token_ids(20_000)))
    assert_drawn_from(np.histogram(u, bins=100, range=(0, 1))[0], np.full(100, 0.01))
    ranked = np.sort(u)
    places = np.arange(1, len(u) + 1) / len(u)
    assert np.abs(ranked - places).max() * np.sqrt(len(u)) < 2.3  # Kolmogorov-Smirnov, p = 5e-5


@given(seeds, st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_the_noise_of_a_few_tokens_equals_that_of_arrays(seed: int, position: int, tokens: list[int]) -> None:
    all_at_once = gumbel(seed, position, np.array(tokens, dtype=np.int32)).tolist()
    assert gumbel_of(seed, position, tokens) == pytest.approx(all_at_once, rel=1e-12, abs=1e-12)


@given(st.lists(st.tuples(seeds, st.integers(0, 2**40)), min_size=1, max_size=5))
def test_the_noise_of_many_positions_equals_that_of_each(asked: list[tuple[int, int]]) -> None:
    ids = token_ids(100)
    keys = row_keys([seed for seed, _ in asked], [position for _, position in asked])
    for found, (seed, position) in zip(gumbel_rows(keys, np.tile(ids, (len(asked), 1))), asked, strict=True):
        assert found.tolist() == gumbel(seed, position, ids).tolist()


def test_the_ids_of_a_group_are_independent() -> None:
    """The least of a group is drawn first; jointly all of them are still independent exponentials."""
    draws = back_to_uniform(np.array([gumbel(5, position, token_ids(2 * GROUP)) for position in range(4000)]))
    rng = np.random.default_rng(0)
    for a, b in rng.integers(0, 2 * GROUP, size=(40, 2)):
        if a != b:
            cells = np.histogram2d(draws[:, a], draws[:, b], bins=6, range=[[0, 1], [0, 1]])[0].ravel()
            assert_drawn_from(cells.astype(int), np.full(36, 1 / 36))
    best = draws[:, :GROUP].argmax(axis=1)
    assert_drawn_from(np.bincount(best, minlength=GROUP), np.full(GROUP, 1 / GROUP))
    x = np.sort(-np.log(draws[:, :GROUP]), axis=1)
    spacings = np.diff(x, axis=1, prepend=0.0) * np.arange(GROUP, 0, -1)  # independent exponentials (Rényi 1953)
    for rank in (0, 1, 31, 62, 63):
        u = -np.expm1(-spacings[:, rank])
        assert_drawn_from(np.histogram(u, bins=40, range=(0, 1))[0], np.full(40, 1 / 40))


def test_the_least_of_a_group_bounds_all_of_it() -> None:
    keys = row_keys([3, -8], [0, 9])
    least = group_minima(keys, 40)
    for row, (seed, position) in enumerate([(3, 0), (-8, 9)]):
        x = np.exp(-gumbel(seed, position, token_ids(40 * GROUP))).reshape(40, GROUP)
        assert x.min(axis=1) == pytest.approx(least[row], rel=1e-12)


def test_noise_over_positions_and_over_seeds_is_uniform() -> None:
    for draw in (lambda i: gumbel(3, i, token_ids(1)), lambda i: gumbel(i, 3, token_ids(1))):
        u = back_to_uniform(np.array([draw(i)[0] for i in range(4000)]))
        assert_drawn_from(np.histogram(u, bins=50, range=(0, 1))[0], np.full(50, 0.02))


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (-1, 1, 0), (2**64, 0, 0)])
def test_neighbours_are_independent(shift: tuple[int, int, int]) -> None:
    seed, position, token = shift
    ids = token_ids(30_000)
    a = back_to_uniform(gumbel(10, 10, ids))
    b = back_to_uniform(gumbel(10 + seed, 10 + position, ids + np.int32(token)))
    cells = np.histogram2d(a, b, bins=10, range=[[0, 1], [0, 1]])[0].ravel()
    assert_drawn_from(cells.astype(int), np.full(100, 0.01))


def test_uniform_by_position_and_purpose() -> None:
    draws = np.array([uniform(4, i, "coin") for i in range(4000)])
    assert_drawn_from(np.histogram(draws, bins=50, range=(0, 1))[0], np.full(50, 0.02))
    other = np.array([uniform(4, i, "select") for i in range(4000)])
    cells = np.histogram2d(draws, other, bins=8, range=[[0, 1], [0, 1]])[0].ravel()
    assert_drawn_from(cells.astype(int), np.full(64, 1 / 64))
    assert len({uniform(1, 2, name) for name in ("", "a", "aa", "\0", "\0\0", "gumbel", "b")}) == 7


def test_golden_values_both_sides_of_a_link_must_agree_on() -> None:
    ids = np.array([0, 1, 2, 65_536, 151_935], dtype=np.int32)
    expected = {
        (0, 0): [0.219931709109321, -0.278820643175823, 0.473177481927366, -0.0206597711148449, 0.327412045650602],
        (1234, 56): [1.88799855370292, 3.7700332056308, -0.208937005364134, -0.184941998018186, -0.264596507456824],
        (-1, 7): [1.90251590714124, -0.653428886265067, 0.947368394772425, 2.45582938995545, -0.996861411275813],
        (2**64 + 5, 2**33): [
            1.28485634750131,
            -0.785018006952933,
            1.18277908194651,
            0.482935710163907,
            -0.710990863408337,
        ],
    }
    for (seed, position), noise in expected.items():
        assert gumbel(seed, position, ids) == pytest.approx(noise, rel=1e-13)
    assert uniform(0, 0, "coin") == 0.44581319478515236
    assert uniform(1234, 56, "coin") == 0.6690121900443987
    assert uniform(-5, 1, "select") == 0.21546161367549532


@given(seeds, st.integers(0, 2**40), st.lists(st.integers(0, 40_000), min_size=1, max_size=50, unique=True))
def test_noise_of_a_subset_is_the_subset_of_the_noise(seed: int, position: int, chosen: list[int]) -> None:
    subset = np.array(sorted(chosen), dtype=np.int32)
    whole = gumbel(seed, position, token_ids(40_001))
    assert np.array_equal(gumbel(seed, position, subset), whole[subset])


@given(st.integers(0, 10_000), st.floats(-20, 20), st.floats(0.1, 30))
def test_contenders_never_miss_an_id_that_reaches_the_score(seed: int, score: float, spread: float) -> None:
    ids = token_ids(20_000)
    weights = np.exp(np.random.default_rng(seed).normal(size=len(ids)) * spread - 10)
    weights[::7] = 0.0
    with np.errstate(divide="ignore"):
        reached = np.flatnonzero(np.log(weights) + gumbel(seed, 9, ids) >= score)
    named = contenders(seed, 9, ids, weights, score)
    assert set(reached) <= set(named)
    assert np.all(np.diff(named) > 0)
    assert not (weights[named] == 0.0).any()


def test_noise_is_finite_for_millions_of_ids() -> None:
    """u is never 0 or 1, so noise alone neither forbids nor forces a token."""
    noise = gumbel(0, 0, token_ids(1_000_000))
    assert np.isfinite(noise).all()
    assert -3.0 < noise.min() < -2.3
    assert 11.0 < noise.max() < 36.75


def test_without_ids_or_weights_there_are_no_contenders() -> None:
    assert contenders(0, 0, token_ids(0), np.empty(0), 0.0).tolist() == []
    assert contenders(0, 0, token_ids(9), np.zeros(9), 0.0).tolist() == []


# ---- `process_logits`, `filter_top` and `sample` against straightforward references ---------------------------------
VOCAB = 12
rows = st.lists(st.floats(-15, 15, width=32), min_size=VOCAB, max_size=VOCAB).map(
    lambda row: np.array(row, dtype=np.float32)
)
tied_rows = st.lists(st.integers(0, 3), min_size=VOCAB, max_size=VOCAB).map(lambda row: np.array(row, dtype=np.float32))
counts = st.dictionaries(st.integers(0, VOCAB + 2), st.integers(0, 6), max_size=5)
biases = st.dictionaries(st.integers(0, VOCAB + 2), st.floats(-100, 100), max_size=4)
penalties = st.floats(-2, 2)
temperatures = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 2.0))


def reference_process_logits(row: np.ndarray, params: SamplingParams, seen: dict[int, int]) -> np.ndarray:
    """OpenAI's formula, token by token, on logits."""
    scores = [float(score) for score in row]
    for token in range(len(scores)):
        count = seen.get(token, 0)
        scores[token] += params.logit_bias.get(token, 0.0)
        scores[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    temperature = params.temperature or 1.0
    powers = np.array([math.exp((score - max(scores)) / temperature) for score in scores])
    return powers / powers.sum()


@given(rows, temperatures, st.floats(0.5, 2.0), biases, counts, st.lists(st.integers(0, VOCAB + 2), max_size=6))
def test_the_repetition_penalty_is_hugging_face_s_and_applies_first(
    row: np.ndarray, temperature: float, penalty: float, bias: dict[int, float], seen: dict[int, int], prompt: list[int]
) -> None:
    context = [*prompt, *(token for token, count in seen.items() if count)]
    context = [token for token in context if token < VOCAB]
    expected = torch.tensor(row).double()[None]
    if context:
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor([context]), expected)  # type: ignore[arg-type]  # it takes float64 as well
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, logit_bias=bias, presence_penalty=0.5)
    processed = process_logits(from_logits(row), params, seen, np.array(prompt, dtype=np.int32))
    assert np.allclose(
        processed.probs, reference_process_logits(expected[0].numpy(), params, seen), rtol=1e-9, atol=1e-15
    )


@given(rows, st.floats(1.01, 2.0), st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_a_mask_and_a_smaller_vocabulary_keep_the_scores_that_a_penalty_needs(
    row: np.ndarray, penalty: float, allowed: set[int]
) -> None:
    which = np.isin(np.arange(VOCAB), list(allowed))
    params, prompt = SamplingParams(repetition_penalty=penalty), np.arange(0, VOCAB, 2, dtype=np.int32)
    penalised = np.where(np.isin(np.arange(VOCAB), prompt), np.where(row > 0, row / penalty, row * penalty), row)
    held = process_logits(apply_mask(from_logits(row), which), params, {}, prompt)
    assert np.allclose(held.probs[which], from_logits(penalised[which]).probs, rtol=1e-6, atol=1e-12)
    padded = from_logits(np.concatenate((row, row)))
    assert np.allclose(padded.within(VOCAB).log_norm, from_logits(row).log_norm, atol=1e-9)


def test_defaults_give_way_in_turn() -> None:
    request, server, model = (
        SamplingDefaults(temperature=0.0),
        SamplingDefaults(temperature=0.5, top_k=5),
        SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8),
    )
    assert request.over(server.over(model)) == SamplingDefaults(temperature=0.0, top_k=5, top_p=0.8)


def reference_filter_top(probs: np.ndarray, params: SamplingParams) -> list[int]:
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = math.fsum(probs[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += probs[i]
        if mass >= params.top_p * total:
            break
    return sorted(i for i in kept if probs[i] >= params.min_p * probs.max()) or order[:1]


@given(rows, temperatures, penalties, penalties, biases, counts)
def test_process_logits_equals_the_formula_on_logits(
    row: np.ndarray, temperature: float, presence: float, frequency: float, bias: dict[int, float], seen: dict[int, int]
) -> None:
    params = SamplingParams(
        temperature=temperature, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    processed = process_logits(from_logits(row), params, seen)
    assert np.allclose(processed.probs, reference_process_logits(row, params, seen), rtol=1e-9, atol=1e-15)
    assert processed.tail == 0.0


@pytest.mark.parametrize(
    ("params", "seen"),
    [
        (SamplingParams(), {3: 5}),
        (SamplingParams(temperature=0.0), {3: 5}),
        (SamplingParams(presence_penalty=1.0), {}),
        (SamplingParams(frequency_penalty=1.0), {1: 0}),
        (SamplingParams(logit_bias={99: 5.0, 1: 0.0}), {}),
        (SamplingParams(top_p=0.5, top_k=3, min_p=0.1), {}),
    ],
)
def test_process_logits_with_nothing_to_do_returns_the_same_object(
    params: SamplingParams, seen: dict[int, int]
) -> None:
    dist = Dist.dense(np.full(8, 1 / 8))
    assert process_logits(dist, params, seen) is dist


def test_when_all_likely_tokens_are_forbidden_the_rest_keep_their_proportions() -> None:
    dist = from_logits(np.array([0, -350, -351, -np.inf], dtype=np.float32))
    processed = process_logits(dist, SamplingParams(frequency_penalty=2.0), {0: 400})
    assert processed.probs[1] / processed.probs[2] == pytest.approx(math.e)
    assert processed.probs[3] == 0.0
    assert math.isclose(float(processed.probs.sum()), 1.0)


def test_processing_a_sparse_distribution_keeps_the_tail_unbiased() -> None:
    dense = from_logits(np.array([3, 2, 1, 0, -1], dtype=np.float32))
    params = SamplingParams(logit_bias={0: -1.0, 2: 2.0})
    few = dense.kept_at(np.array([0, 1, 2]))
    whole, part = process_logits(dense, params, {}), process_logits(few, params, {})
    assert part.ids.tolist() == [0, 1, 2]
    assert np.allclose(part.probs, whole.probs[:3])
    assert part.tail == pytest.approx(float(whole.probs[3:].sum()))
    tempered = process_logits(few, SamplingParams(temperature=0.5), {})
    assert float(tempered.probs.sum()) + tempered.tail == pytest.approx(1.0)


def test_processing_a_distribution_without_mass_on_ids_does_not_fail() -> None:
    empty = Dist(np.empty(0, dtype=np.int32), np.empty(0), 1.0)
    assert process_logits(empty, SamplingParams(temperature=0.5), {}).tail == 1.0
    nothing = Dist.dense(np.zeros(3))
    assert process_logits(nothing, SamplingParams(temperature=0.5), {}) is nothing
    assert process_logits(nothing, SamplingParams(logit_bias={1: 3.0}), {}) is nothing


@given(st.one_of(rows, tied_rows), st.integers(0, VOCAB + 1), st.floats(0, 1), st.floats(0, 1))
def test_filter_top_keeps_what_a_full_sort_keeps(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    dist = from_logits(row)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    cut = filter_top(dist, params)
    kept = reference_filter_top(dist.probs, params)
    assert cut.ids.tolist() == kept or _on_the_border(dist.probs, cut.ids, kept, params)
    assert np.array_equal(cut.probs, dist.probs[cut.ids])
    assert float(cut.probs.sum()) + cut.tail == pytest.approx(1.0)
    assert dist.argmax() in cut.ids


def _on_the_border(probs: np.ndarray, ids: np.ndarray, kept: list[int], params: SamplingParams) -> bool:
    """Sums in another order may differ in the last bit, so that one token more or less is correct."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: params.top_k or None]
    shares = np.cumsum([probs[i] for i in order]) / math.fsum(probs[i] for i in order)
    close = bool(np.abs(shares - params.top_p).min() < 1e-12)
    return close and abs(len(ids) - len(kept)) <= len(probs)


def test_a_sparse_tail_counts_as_mass_for_top_p() -> None:
    few = Dist(np.array([2, 5, 9], dtype=np.int32), np.array([0.4, 0.3, 0.1]), 0.2)
    assert filter_top(few, SamplingParams(top_p=0.7)).ids.tolist() == [2, 5]
    assert filter_top(few, SamplingParams(top_p=0.71)).ids.tolist() == [2, 5, 9]
    assert filter_top(few, SamplingParams(top_p=0.95)) is few


@given(rows, temperatures, st.integers(-(2**65), 2**65), st.integers(0, 10**6))
def test_sample_is_the_argmax_over_all_ids_with_noise(
    row: np.ndarray, temperature: float, seed: int, position: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed)
    dist = process_logits(from_logits(row), params, {})
    noise = gumbel(seed, position, dist.ids) if temperature else np.zeros(VOCAB)
    with np.errstate(divide="ignore"):
        best = int(np.argmax(np.log(dist.probs) + noise))
    assert sample(dist, params, position) == best


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 8.0, 60.0])
def test_the_shortcut_of_sample_equals_the_full_computation_on_a_large_vocabulary(spread: float) -> None:
    generator = np.random.default_rng(1)
    for position in range(10):
        dist = from_logits((generator.normal(size=50_000) * spread).astype(np.float32))
        with np.errstate(divide="ignore"):
            full = np.log(dist.probs) + gumbel(77, position, dist.ids)
        assert sample(dist, SamplingParams(seed=77), position) == int(np.argmax(full))


def test_greedy_takes_the_lowest_of_equals_and_ignores_the_seed() -> None:
    dist = Dist(np.array([4, 6, 8], dtype=np.int32), np.array([0.2, 0.4, 0.4]), 0.0)
    assert {sample(dist, SamplingParams(temperature=0.0, seed=s), s) for s in range(20)} == {6}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [0, 3])
def test_sampling_without_any_probability_is_an_error(temperature: float, size: int) -> None:
    with pytest.raises(ValueError, match="probability"):
        sample(Dist(token_ids(size), np.zeros(size), 1.0), SamplingParams(temperature=temperature), 0)


# ---- incremental text -----------------------------------------------------------------------------------------------
def first_complete(text: str, stops: tuple[str, ...]) -> int | None:
    """Index where the answer ends, found by reading one more character at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


letters = st.text(alphabet="abé", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4).map(tuple)


@given(letters, stop_lists, st.lists(st.integers(1, 5), max_size=30))
def test_stops_do_not_depend_on_how_the_text_is_cut(text: str, stops: tuple[str, ...], sizes: list[int]) -> None:
    filter_, sent, at, found = StopStrings(stops), "", 0, False
    for size in [*sizes, len(text)]:
        safe, found = filter_.push(text[at : at + size])
        at += size
        sent += safe
        end = first_complete(text, stops)
        assert text[: len(text) if end is None else end].startswith(sent), "sent too much"
        if found:
            break
    if not found:
        sent += filter_.flush()
    end = first_complete(text, stops)
    assert found == (end is not None)
    assert sent == (text if end is None else text[:end])


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    filter_ = StopStrings(("\n\nUser:",))
    assert filter_.push("Yes.\n") == ("Yes.", False)
    assert filter_.push("No.\n\nUs") == ("\nNo.", False)
    assert filter_.push("ed") == ("\n\nUsed", False)
    assert filter_.push("\n\nUser: hi") == ("", True)
    assert filter_.push("more") == ("", True)
    assert filter_.flush() == ""


def test_without_stops_everything_passes_and_an_empty_one_is_refused() -> None:
    assert StopStrings(()).push("anything") == ("anything", False)
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""))


def test_text_that_may_not_end_completes_no_stop_string_and_what_follows_does() -> None:
    early = StopStrings(("ab", "abc"))
    assert early.push("xab", may_end=False) == ("x", False)  # held: the longer one may still come
    assert early.push("d ab") == ("abd ", True)
    across = StopStrings(("END",))
    assert across.push("aEN", may_end=False) == ("a", False)
    assert across.push("D") == ("", True) and across.found == "END"
