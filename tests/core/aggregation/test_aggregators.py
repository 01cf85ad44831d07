"""Weights of documents, the rules that decide a target, which document decided it, and the side that decides."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lab.baselines.dragon import token_seconds
from paceline.core.aggregation.aggregators import (
    LAST_LEVEL,
    Aggregator,
    AggregatorName,
    OwnDist,
    PeerDist,
    TargetToken,
    default_aggregator,
    lane_of,
    make_aggregator,
)
from paceline.core.aggregation.weights import (
    EVIDENCE_DECAY,
    EVIDENCE_SCALE,
    MAX_SURPRISAL,
    decayed_evidence,
    deciders,
    dequantize_score,
    evidence_head,
    log_weight,
    mix,
    mix_heads,
    quantize_score,
    side_weights,
)
from paceline.core.sampling.dist import Dist, quantize
from paceline.core.sampling.sampler import SamplingParams, filter_top
from paceline.core.side import SIDES, Side, other
from paceline.strategies.aggregate.state import DeciderPlacement, lasting_seconds
from paceline.wire.codec import decode_head, encode_head
from tests.core.chi_square import assert_drawn_from
from tests.core.dists import from_logits, total_variation

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
    for _ in range(8):
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


# ---- the three aggregators ------------------------------------------------------------------------------------------
NAMES: tuple[AggregatorName, ...] = ("mixture", "coin", "paper")
SAMPLINGS = {
    "plain": SamplingParams(seed=3),
    "top_p": SamplingParams(seed=3, top_p=0.8),
    "top_k": SamplingParams(seed=3, top_k=3),
    "min_p": SamplingParams(seed=3, min_p=0.2),
    "all": SamplingParams(seed=3, top_p=0.9, top_k=5, min_p=0.05, temperature=0.7),
    "greedy": SamplingParams(seed=3, temperature=0.0, top_p=0.5),
}
kinds = st.sampled_from(sorted(SAMPLINGS))
untimed = settings(deadline=None, max_examples=80)


def random_dists(number: int, vocab: int, spread: float, apart: float = 1.0) -> dict[Side, Dist]:
    generator = np.random.default_rng(number)
    common = generator.normal(size=vocab) * spread
    return {side: from_logits(common + generator.normal(size=vocab) * apart) for side in SIDES}


def weights_of(cloud: float) -> dict[Side, float]:
    return {"cloud": cloud, "device": 1.0 - cloud}


def received(aggregator: Aggregator, side: Side, dist: Dist, position: int, level: int) -> PeerDist | None:
    """The message of `side` as the peer receives it through the wire."""
    sent = aggregator.to_wire(side, OwnDist.of(dist), position, level)
    if sent.head is None:
        return aggregator.from_wire(side, None, sent.token, position, level)
    head = decode_head(encode_head(sent.head, precise=level > 0), len(dist.ids))
    return aggregator.from_wire(side, head, None, position, level)


def decide(
    aggregator: Aggregator, side: Side, dists: Mapping[Side, Dist], weights: Mapping[Side, float], position: int
) -> tuple[TargetToken, int]:
    """The target that `side` decides, and the level of detail it needs."""
    peer = other(side)
    for level in range(LAST_LEVEL + 1):
        theirs = received(aggregator, peer, dists[peer], position, level) if weights[peer] > 0 else None
        own = OwnDist.of(dists[side]) if weights[side] > 0 else None
        if (target := aggregator.decide(side, own, theirs, weights, position)) is not None:
            return target, level
    raise AssertionError("the last level must decide")


# ---- equal on both sides --------------------------------------------------------------------------------------------
@untimed
@given(
    st.sampled_from(NAMES),
    kinds,
    st.booleans(),
    st.integers(0, 2**32),
    st.sampled_from([2, 9, 300]),
    st.sampled_from([0.1, 1.0, 4.0, 15.0]),
    st.sampled_from([0.0, 0.03, 0.5, 0.8, 1.0]),
    st.integers(0, 10_000),
)
def test_both_sides_decide_the_same_target(
    name: AggregatorName,
    kind: str,
    dists_needed: bool,
    number: int,
    vocab: int,
    spread: float,
    cloud: float,
    position: int,
) -> None:
    dists, weights = random_dists(number, vocab, spread), weights_of(cloud)
    aggregator = make_aggregator(name, SAMPLINGS[kind], needs_dists=dists_needed, vocab_size=vocab)
    assert aggregator.sends_choices == (name == "coin")
    assert aggregator.reads_heads == (name != "paper" or SAMPLINGS[kind].temperature == 0.0)
    decided = [decide(aggregator, side, dists, weights, position)[0] for side in SIDES]
    assert decided[0].token == decided[1].token
    if cloud in (0.0, 1.0):  # the other side has no distribution of its own
        assert {target.lane for target in decided} == {"cloud" if cloud else "device"}
    assert all((target.dist is None) == (name == "coin") for target in decided)
    assert all(target.dist is None or target.dist.prob(target.token) > 0 for target in decided)


def test_a_dist_whose_best_ids_are_too_unlikely_for_the_wire_is_requested_again() -> None:
    """The noise may favour an id of probability 1e-12, which leaves the head empty."""
    sampling = SamplingParams()
    aggregator = make_aggregator("mixture", sampling)
    nothing = aggregator.from_wire("cloud", Dist(np.empty(0, dtype=np.int32), np.empty(0), 1.0), None, 0, 0)
    assert nothing is not None
    own = OwnDist.of(Dist.dense(np.array([0.5, 0.3, 0.2])))
    assert aggregator.decide("device", own, nothing, weights_of(0.5), 0) is None
    assert aggregator.from_wire("cloud", nothing.head, None, 0, LAST_LEVEL) is None, "the last level must have ids"
    tiny = Dist.dense(np.array([1.0 - 1e-11, 1e-11]))
    ids = [
        len(head.ids)
        for at in range(50)
        if (head := aggregator.to_wire("cloud", OwnDist.of(tiny), at).head) is not None
    ]
    assert max(ids) == 1, "an id that 16 bits cannot hold is not sent"


def test_without_a_needed_dist_there_is_no_target() -> None:
    dists, weights = random_dists(1, 50, 1.0), weights_of(0.5)
    for name in ("mixture", "paper"):
        aggregator = make_aggregator(name, SAMPLINGS["plain"])
        sent = aggregator.to_wire("cloud", OwnDist.of(dists["cloud"]), 0)
        assert aggregator.decide("device", OwnDist.of(dists["device"]), None, weights, 0) is None
        assert aggregator.decide("device", None, sent, weights, 0) is None
        assert aggregator.from_wire("cloud", None, 3, 0, 0) is None
    assert make_aggregator("coin", SAMPLINGS["plain"]).from_wire("cloud", dists["cloud"], None, 0, 0) is None


# ---- the coin -------------------------------------------------------------------------------------------------------
def test_the_coin_needs_only_the_side_it_picks() -> None:
    aggregator, dists, weights = (
        make_aggregator("coin", SAMPLINGS["plain"]),
        random_dists(2, 50, 1.0, apart=3.0),
        weights_of(0.5),
    )
    seen = set()
    for position in range(60):
        sent = {side: aggregator.to_wire(side, OwnDist.of(dists[side]), position) for side in SIDES}
        alone = {side: aggregator.decide(side, OwnDist.of(dists[side]), None, weights, position) for side in SIDES}
        (picked,) = (side for side in SIDES if alone[side] is not None)
        seen.add(picked)
        by_peer = aggregator.decide(other(picked), None, sent[picked], weights, position)
        both = aggregator.decide(picked, OwnDist.of(dists[picked]), sent[other(picked)], weights, position)
        assert by_peer is not None
        assert both is not None
        assert by_peer.token == both.token == sent[picked].token
        assert by_peer.lane == picked
        agree = sent["cloud"].token == sent["device"].token
        assert both.lane == (None if agree else picked)
        assert aggregator.draft_tokens(picked, dists[picked], weights, position, 4) == [sent[picked].token]
        assert len(aggregator.draft_tokens(other(picked), dists[other(picked)], weights, position, 4)) == 4
        assert len(aggregator.draft_tokens(picked, dists[picked], None, position, 4)) == 4
    assert seen == set(SIDES)


# ---- distributions of the targets -----------------------------------------------------------------------------------
def played(
    name: AggregatorName, dists: Mapping[Side, Dist], weights: Mapping[Side, float], count: int = 1500
) -> tuple[NDArray[np.int64], list[float]]:
    """How often each token was the target; and shares of targets that are the cloud's draft, the device's, and both."""
    aggregator, counts, hits = make_aggregator(name, SamplingParams(seed=17)), np.zeros(6, dtype=np.int64), np.zeros(3)
    for position in range(count):
        target, _ = decide(aggregator, "cloud", dists, weights, position)
        drafts = [aggregator.to_wire(side, OwnDist.of(dists[side]), position).token for side in SIDES]
        hits += (*(token == target.token for token in drafts), {*drafts} == {target.token})
        counts[target.token] += 1
    return counts, [float(share) for share in hits / count]


@pytest.mark.parametrize("name", NAMES)
def test_targets_follow_the_mixture_and_common_noise_accepts_as_many_drafts_as_its_bound_says(
    name: AggregatorName,
) -> None:
    """The bound of Daliri, Musco and Suresh (arXiv 2408.07978); the coin's follows from it."""
    dists, weights = random_dists(3, 6, 1.0), weights_of(0.35)
    counts, shares = played(name, dists, weights)
    cut = {side: quantize(dists[side], top_p=0.999) for side in SIDES} if name == "paper" else dists
    probs = np.zeros(6)
    for side in SIDES:
        probs[cut[side].ids] += weights[side] * cut[side].probs / cut[side].probs.sum()
    assert_drawn_from(counts, probs)
    delta = total_variation(dists["cloud"], dists["device"])
    assert sum(shares[:2]) <= 2.0 - delta + 0.03, "no rule can accept more"
    for side, share in zip(SIDES, shares, strict=False):
        theirs = weights[other(side)]
        apart = theirs * delta if name == "mixture" else delta
        bound = (1.0 - apart) / (1.0 + apart)
        if name != "paper":
            assert share >= (bound if name == "mixture" else 1.0 - theirs + theirs * bound) - 0.025


@pytest.mark.parametrize("name", ["coin", "paper"])
def test_each_side_applies_top_k_before_the_mixture(name: AggregatorName) -> None:
    sampling, count = SamplingParams(seed=5, top_k=3), 1200
    dists, weights = random_dists(9, 6, 1.0), weights_of(0.4)
    aggregator, counts, probs = make_aggregator(name, sampling), np.zeros(6, dtype=np.int64), np.zeros(6)
    for position in range(count):
        counts[decide(aggregator, "cloud", dists, weights, position)[0].token] += 1
    for side in SIDES:
        final = filter_top(dists[side], sampling)
        probs[final.ids] += weights[side] * final.probs / final.probs.sum()
    assert_drawn_from(counts, probs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shares"),
    # Two tokens: common noise couples them as well as can be, the mixture .80/.80 by hand, the coin 1 - delta / 2;
    # Algorithm 1 draws independently (eq. 5).
    [("paper", (0.68, 0.64, 0.38)), ("mixture", (0.8, 0.8, 0.6)), ("coin", (0.8, 0.8, 0.6))],
)
def test_drafts_of_two_tokens_are_accepted_as_often_as_by_hand(name: AggregatorName, shares: tuple[float, ...]) -> None:
    dists: dict[Side, Dist] = {"cloud": LEFT, "device": RIGHT}
    assert played(name, dists, weights_of(0.5))[1] == pytest.approx(shares, abs=0.03)


# ---- drafts ---------------------------------------------------------------------------------------------------------
@untimed
@given(st.sampled_from(NAMES), kinds, st.integers(0, 2**32), st.sampled_from([1, 5, 60]), st.integers(1, 9))
def test_draft_tokens_are_distinct_possible_and_begin_with_the_draft(
    name: AggregatorName, kind: str, number: int, vocab: int, count: int
) -> None:
    dist = random_dists(number, vocab, 2.0)["cloud"]
    aggregator = make_aggregator(name, SAMPLINGS[kind])
    drafts = aggregator.draft_tokens("cloud", dist, None, 4, count)
    assert drafts[0] == aggregator.to_wire("cloud", OwnDist.of(dist), 4).token
    assert len(set(drafts)) == len(drafts) <= count
    assert all(filter_top(dist, SAMPLINGS[kind]).prob(token) > 0 for token in drafts)


def test_the_default_is_the_coin_unless_the_request_needs_the_mixture() -> None:
    assert default_aggregator(SamplingParams(), logprobs=False, seeded=False) == "coin"
    assert default_aggregator(SamplingParams(), logprobs=True, seeded=False) == "mixture"
    assert default_aggregator(SamplingParams(), logprobs=False, seeded=True) == "mixture"
    for kind in ("top_p", "top_k", "min_p", "greedy"):
        assert default_aggregator(SAMPLINGS[kind], logprobs=False, seeded=False) == "mixture"


def test_the_lane_is_the_side_with_a_clear_majority() -> None:
    dists: dict[Side, Dist] = {"cloud": Dist.dense(np.array([0.3, 0.7])), "device": Dist.dense(np.array([0.2, 0.8]))}
    assert lane_of(0, dists) is None
    dists["device"] = Dist.dense(np.array([0.1, 0.9]))
    assert lane_of(0, dists) == "cloud"
    assert lane_of(1, dists) is None
    assert lane_of(1, {"device": dists["device"]}) == "device"


# ---- which documents decided a token --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("weights", "probs", "decided"),
    [
        ((0.0, 0.0), (0.9, 0.1), {0}),
        ((0.0, 0.0, 0.0), (0.1, 0.9, 0.8), {1, 2}),
        ((0.0, 0.0), (0.99, 0.98), None),  # all give it: it tells nothing of any
        ((0.0, 0.3), (1.0, 1.0), None),
        ((math.log(4.0), 0.0), (0.3, 0.5), {0}),  # as in the mixture
        ((1000.0, -1000.0), (0.5, 0.5), {0}),
        ((0.0,), (0.2,), None),
        ((), (), None),
        ((0.0, 0.0), (0.0, 0.0), None),  # as a constraint forces it
    ],
)
def test_documents_with_a_large_share_of_a_tokens_probability_decided_it(
    weights: tuple[float, ...], probs: tuple[float, ...], decided: set[int] | None
) -> None:
    assert deciders(weights, probs) == decided


# ---- the placement at a rejection -----------------------------------------------------------------------------------
seconds = st.floats(0.001, 10.0)
delays = st.floats(0.0, 10.0)
rates = st.floats(0.0, 1.0)


def placed(
    holder: Side = "device", *, cloud: float = 0.06, device: float = 0.06, trip: float = 0.3, fixed: Side | None = None
) -> DeciderPlacement:
    placement = DeciderPlacement(holder, fixed=fixed)
    placement.decode["cloud"] = cloud
    placement.decode["device"] = device
    placement.round_trip = trip
    return placement


@pytest.mark.parametrize(
    ("speeds", "accepted", "moves"),
    [
        ({}, {"device": True, "cloud": False}, True),
        ({}, {"device": False, "cloud": True}, False),
        ({}, {"device": False}, False),  # what the cloud drafted is not known
        ({}, {}, False),
        ({"cloud": 0.006, "device": 0.2, "trip": 0.1}, {"device": True, "cloud": False}, False),  # it hides the trip
        ({"cloud": 0.2, "device": 0.006, "trip": 0.1}, {"device": True, "cloud": False}, True),
    ],
)
def test_the_decision_follows_a_rejection_to_the_other_side_unless_that_is_slower(
    speeds: dict[str, float], accepted: dict[Side, bool], moves: bool
) -> None:
    """Speeds and what was accepted as of a device that decides, and the other way round."""
    for holder in SIDES:
        mirrored = {"device": holder, "cloud": other(holder), "trip": "trip"}
        placement = placed(holder, **{mirrored[of]: each for of, each in speeds.items()})
        placement.observe_target({side if holder == "device" else other(side): each for side, each in accepted.items()})
        assert placement.choose(50, ready=True) == (other(holder) if moves else holder)


def test_a_side_fixed_by_privacy_keeps_it() -> None:
    placement = placed("cloud", fixed="device")
    placement.observe_target({"cloud": False, "device": True})
    assert placement.holder == placement.choose(50, ready=True) == "device"


def test_a_move_that_costs_in_the_long_run_is_made_for_the_last_targets_only() -> None:
    """Their number bounds the loss; a move now saves a one-way delay in any case."""
    placement = placed(cloud=0.02, device=0.1, trip=0.06)
    for _ in range(100):
        placement.observe_target({"cloud": True, "device": True})
    placement.observe_target({"cloud": False, "device": True})
    chosen = [placement.choose(left, ready=True) for left in (0, 1, 5, 50)]
    assert chosen == sorted(chosen), "the cloud first, if ever"


@given(seconds, seconds, delays, rates)
def test_the_option_to_move_makes_no_place_slower(here: float, there: float, round_trip: float, rate: float) -> None:
    lasting = lasting_seconds(here, there, round_trip, rate)
    assert max(here, there) - 1e-12 <= lasting <= token_seconds(here, there, round_trip, rate) + 1e-12


def test_nothing_moves_while_a_speed_or_the_round_trip_is_unknown() -> None:
    placement = DeciderPlacement("device")
    placement.observe_target({"cloud": False, "device": True})
    placement.decode["cloud"] = 0.06
    placement.round_trip = 1.0
    assert placement.choose(20, ready=True) == "device"
    placement.decode["device"] = 0.06
    assert placement.choose(20, ready=True) == "cloud"
