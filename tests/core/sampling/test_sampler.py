"""`process_logits`, `filter_top` and `sample` against straightforward references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from paceline.core.sampling.dist import Dist, gumbel, token_ids
from paceline.core.sampling.sampler import (
    SamplingDefaults,
    SamplingParams,
    apply_mask,
    filter_top,
    process_logits,
    sample,
)
from tests.core.chi_square import assert_drawn_from
from tests.core.dists import from_logits

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


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_sample_draws_from_the_distribution(over: str) -> None:
    probs = np.array([0.4, 0.25, 0.0, 0.2, 0.1, 0.04, 0.01, 0.0])
    dist, drawn = Dist.dense(probs), np.zeros(8, dtype=np.int64)
    for i in range(5000):
        seed, position = (i, 3) if over == "seeds" else (3, i)
        drawn[sample(dist, SamplingParams(seed=seed), position)] += 1
    assert_drawn_from(drawn, probs)


def test_greedy_takes_the_lowest_of_equals_and_ignores_the_seed() -> None:
    dist = Dist(np.array([4, 6, 8], dtype=np.int32), np.array([0.2, 0.4, 0.4]), 0.0)
    assert {sample(dist, SamplingParams(temperature=0.0, seed=s), s) for s in range(20)} == {6}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [0, 3])
def test_sampling_without_any_probability_is_an_error(temperature: float, size: int) -> None:
    with pytest.raises(ValueError, match="probability"):
        sample(Dist(token_ids(size), np.zeros(size), 1.0), SamplingParams(temperature=temperature), 0)
