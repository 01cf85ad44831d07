"""The three aggregators: exact in distribution, equal on both sides, undecided if the head does not suffice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, quantize
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample
from paceline.core.side import SIDES, Side, other
from paceline.wire.codec import decode_head, encode_head
from tests.core.chi_square import assert_drawn_from
from tests.core.dists import from_logits

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
    assert all((target.dist is None) == (name == "coin") for target in decided)
    assert all(target.dist is None or target.dist.prob(target.token) > 0 for target in decided)


@untimed
@given(kinds, st.booleans(), st.integers(0, 2**32), st.sampled_from([0.2, 1.0, 4.0]), st.floats(0.02, 0.98))
def test_the_mixture_decides_as_if_it_had_both_rows(
    kind: str, dists_needed: bool, number: int, spread: float, cloud: float
) -> None:
    sampling, position = SAMPLINGS[kind], number % 1000
    dists, weights = random_dists(number, 300, spread), weights_of(cloud)
    aggregator = make_aggregator("mixture", sampling, needs_dists=dists_needed)
    mixed = mix_weighted([dists[side] for side in SIDES], [weights[side] for side in SIDES])
    truth = sample(filter_top(mixed, sampling), sampling, position)
    for side in SIDES:
        peer = other(side)
        for level in range(LAST_LEVEL + 1):  # each level by itself: none may decide otherwise
            theirs = received(aggregator, peer, dists[peer], position, level)
            target = aggregator.decide(side, OwnDist.of(dists[side]), theirs, weights, position)
            assert target is None or target.token == truth
        assert target is not None, "the last level always decides"


def zipf_rows(number: int, vocab: int) -> dict[Side, Dist]:
    generator = np.random.default_rng(number)
    base = -generator.uniform(1.1, 2.5) * np.log(generator.permutation(vocab) + 1.0)
    base[int(np.argmax(base))] += generator.uniform(0.0, 4.0)
    return {side: from_logits(base + generator.normal(size=vocab) * 0.7) for side in SIDES}


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        (SamplingParams(seed=1), 0.02),
        (SamplingParams(seed=1, temperature=0.0), 0.02),
        (SamplingParams(seed=1, top_p=0.95), 0.3),
    ],
    ids=["plain", "greedy", "top_p"],
)
def test_a_small_head_settles_most_choices_of_a_large_vocabulary(sampling: SamplingParams, most: float) -> None:
    aggregator, unsettled, count = make_aggregator("mixture", sampling), 0, 20
    for number in range(count):
        dists, weights = zipf_rows(number, 40_000), weights_of(0.2 + 0.02 * number)
        mixed = mix_weighted([dists[side] for side in SIDES], [weights[side] for side in SIDES])
        truth = sample(filter_top(mixed, sampling), sampling, number)
        target, level = decide(aggregator, "device", dists, weights, number)
        assert target.token == truth
        unsettled += level > 0
    assert unsettled <= most * count


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


def test_a_side_without_a_dist_of_its_own_takes_the_other_side_s_token() -> None:
    weights = weights_of(1.0)
    for name in NAMES:
        for kind, sampling in SAMPLINGS.items():
            aggregator = make_aggregator(name, sampling, vocab_size=300)
            for number in range(20):
                dists = random_dists(number, 300, 3.0)
                alone = aggregator.decide("cloud", OwnDist.of(dists["cloud"]), None, weights, number)
                assert alone is not None
                assert decide(aggregator, "device", dists, weights, number)[0].token == alone.token, (name, kind)
                assert alone.lane == "cloud"


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
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cloud", [0.3, 0.8])
def test_targets_follow_the_mixture(name: AggregatorName, cloud: float) -> None:
    dists, weights, count = random_dists(7, 6, 1.0), weights_of(cloud), 1500
    aggregator = make_aggregator(name, SamplingParams(seed=11))
    counts = np.zeros(6, dtype=np.int64)
    for position in range(count):
        counts[decide(aggregator, "device", dists, weights, position)[0].token] += 1
    cut = {side: quantize(dists[side], top_p=0.999) for side in SIDES} if name == "paper" else dists
    probs = np.zeros(6)
    for side in SIDES:
        probs[cut[side].ids] += weights[side] * cut[side].probs / cut[side].probs.sum()
    assert_drawn_from(counts, probs)


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


def test_at_temperature_zero_the_paper_is_the_argmax_of_the_mixture() -> None:
    for number in range(50):
        dists, weights = random_dists(number, 80, 1.0), weights_of(0.01 + number / 52)
        aggregator = make_aggregator("paper", SAMPLINGS["greedy"])
        mixed = mix_weighted([dists[side] for side in SIDES], [weights[side] for side in SIDES])
        assert decide(aggregator, "cloud", dists, weights, number)[0].token == mixed.argmax()


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
