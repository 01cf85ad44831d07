"""Mixtures over documents and sides: one softmax over all documents of both sides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.aggregation.weights import (
    EVIDENCE_DECAY,
    EVIDENCE_SCALE,
    MAX_SURPRISAL,
    decayed_evidence,
    dequantize_score,
    evidence_head,
    log_weight,
    mix,
    mix_heads,
    quantize_score,
    side_weights,
)
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, sample
from tests.core.chi_square import assert_drawn_from
from tests.core.dists import from_logits

LEFT, RIGHT = Dist.dense(np.array([0.8, 0.2])), Dist.dense(np.array([0.4, 0.6]))
VOCAB = 7
scores = st.floats(-50, 50)
rows = st.lists(st.floats(-6, 6), min_size=VOCAB, max_size=VOCAB).map(lambda row: from_logits(np.array(row)))
documents = st.lists(st.tuples(rows, scores), min_size=1, max_size=5)


@given(st.lists(scores, min_size=1, max_size=6))
def test_log_weight_is_logsumexp_at_any_scale(values: list[float]) -> None:
    expected = math.log(sum(math.exp(value) for value in values))
    assert log_weight(values) == pytest.approx(expected, abs=1e-9)
    assert log_weight([value + 5000 for value in values]) == pytest.approx(expected + 5000)


def test_no_document_has_no_weight() -> None:
    with pytest.raises(ValueError, match="without documents"):
        log_weight([])
    assert log_weight([-math.inf, -math.inf]) == -math.inf
    assert side_weights({}) == {}
    assert side_weights({"cloud": None, "device": -3.0}) == {"cloud": 0.0, "device": 1.0}
    assert side_weights({"cloud": None, "device": None}) == {"cloud": 0.5, "device": 0.5}


@given(scores, scores)
def test_two_sides_weigh_by_the_sigmoid_of_their_difference(a: float, b: float) -> None:
    weights = side_weights({"cloud": a, "device": b})
    assert weights["cloud"] == pytest.approx(1 / (1 + math.exp(b - a)))
    assert sum(weights.values()) == pytest.approx(1.0)


@given(documents, documents)
def test_mixing_per_side_and_then_sides_is_one_softmax_over_all_documents(
    cloud: list[tuple[Dist, float]], device: list[tuple[Dist, float]]
) -> None:
    sides = [mix([d for d, _ in side], [r for _, r in side]) for side in (cloud, device)]
    weights = [log_weight([r for _, r in side]) for side in (cloud, device)]
    together = mix(sides, weights)
    every = [*cloud, *device]
    total = log_weight([r for _, r in every])
    expected = sum(math.exp(r - total) * d.probs for d, r in every)
    assert np.allclose(together.probs, expected, atol=1e-12)
    assert together.tail == 0.0


def test_the_vector_of_the_oracles() -> None:
    mixed = mix([LEFT, RIGHT], [0.3, 0.3])
    assert mixed.probs == pytest.approx([0.6, 0.4])


def test_drafts_with_common_noise_are_accepted_as_often_as_the_oracle_says() -> None:
    """V=2: each side's draft equals the target in 0.80 of the cases, the optimum; the target follows the mixture."""
    mixed, steps = mix([LEFT, RIGHT], [0.0, 0.0]), 3000
    same, drawn = [0, 0], [0, 0]
    for position in range(steps):
        params = SamplingParams(seed=9)
        target = sample(mixed, params, position)
        drawn[target] += 1
        for side, dist in enumerate((LEFT, RIGHT)):
            same[side] += sample(dist, params, position) == target
    assert_drawn_from(drawn, mixed.probs)
    for accepted in same:
        assert_drawn_from([accepted, steps - accepted], [0.8, 0.2])


@given(st.lists(st.tuples(rows, st.sets(st.integers(0, VOCAB - 1)), scores), min_size=2, max_size=4))
def test_sparse_and_dense_mix_over_the_union_of_ids(parts: list[tuple[Dist, set[int], float]]) -> None:
    dists = [row.kept_at(np.array(sorted(keep), dtype=np.intp)) for row, keep, _ in parts]
    weights = list(side_weights({str(i): score for i, (_, _, score) in enumerate(parts)}).values())
    mixed = mix(dists, [score for _, _, score in parts])
    for token in range(VOCAB):
        expected = sum(w * d.prob(token) for w, d in zip(weights, dists, strict=True))
        assert mixed.prob(token) == pytest.approx(expected, abs=1e-12)
    assert float(mixed.probs.sum()) + mixed.tail == pytest.approx(1.0)
    assert np.all(np.diff(mixed.ids) > 0)


@given(st.lists(st.tuples(rows, scores), min_size=1, max_size=4), st.integers(1, VOCAB))
def test_a_mixture_s_head_has_its_probabilities(parts: list[tuple[Dist, float]], k: int) -> None:
    dists, weights = [row for row, _ in parts], [score for _, score in parts]
    whole, head = mix(dists, weights), mix_heads(dists, weights, k)
    assert {token for dist in dists for token, _ in dist.top(k)} <= set(head.ids.tolist())
    for token in head.ids.tolist():
        assert head.prob(token) == pytest.approx(whole.prob(token), abs=1e-12)
    assert float(head.probs.sum()) + head.tail == pytest.approx(1.0)


@given(st.floats(-40.0, 0.0), st.lists(st.floats(-60.0, 0.0), min_size=1, max_size=30))
def test_evidence_decays_and_no_token_counts_for_more_than_its_bound(before: float, logs: list[float]) -> None:
    evidence = before
    for log in logs:
        evidence = decayed_evidence(evidence, log)
    decay = EVIDENCE_DECAY ** len(logs)
    bounded = [max(log, -MAX_SURPRISAL) for log in reversed(logs)]
    sums = EVIDENCE_SCALE * sum(EVIDENCE_DECAY**age * log for age, log in enumerate(bounded))
    assert evidence == pytest.approx(decay * before + sums)
    assert evidence >= decay * before - EVIDENCE_SCALE * MAX_SURPRISAL / (1 - EVIDENCE_DECAY) - 1e-9


def test_the_head_of_a_distribution_gives_the_same_evidence_as_all_of_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        dist = from_logits(rng.normal(size=5000) * 4.0)
        head = evidence_head(dist)
        assert 0 < len(head.ids) < 300
        of_dist, of_head = (
            [decayed_evidence(1.0, math.log(max(each.prob(t), 1e-30))) for t in range(5000)] for each in (dist, head)
        )
        assert of_dist == of_head


@given(st.floats(-1e4, 1e4))
def test_a_score_survives_the_wire_to_a_32nd_of_a_nat(score: float) -> None:
    sent = dequantize_score(quantize_score(score))
    assert abs(sent - score) <= 1 / 32 and dequantize_score(quantize_score(sent)) == sent
