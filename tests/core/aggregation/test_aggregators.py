"""The three aggregators: exact in law, equal on both sides, and never certain where they should not be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.aggregation.registry import (
    LAST_LEVEL,
    Aggregator,
    AggregatorName,
    PeerDist,
    TargetToken,
    default_aggregator,
    lane_of,
    make_aggregator,
)
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.quantize import quantize
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample
from paceline.core.side import SIDES, Side, other
from paceline.wire.dist_codec import decode_head, encode_head
from tests.core.chi_square import assert_drawn_from

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


def random_laws(number: int, vocab: int, spread: float, apart: float = 1.0) -> dict[Side, Dist]:
    generator = np.random.default_rng(number)
    common = generator.normal(size=vocab) * spread
    return {side: Dist.from_logits(common + generator.normal(size=vocab) * apart) for side in SIDES}


def weights_of(cloud: float) -> dict[Side, float]:
    return {"cloud": cloud, "device": 1.0 - cloud}


def shipped(rule: Aggregator, side: Side, dist: Dist, position: int, level: int) -> PeerDist | None:
    """A share as it comes out of the wire."""
    share = rule.to_wire(side, dist, position, level)
    if share.head is None:
        return rule.from_wire(side, None, share.token, position, level)
    head = decode_head(encode_head(share.head, precise=level > 0), len(dist.ids))
    return rule.from_wire(side, head, None, position, level)


def settle(
    rule: Aggregator, side: Side, laws: Mapping[Side, Dist], weights: Mapping[Side, float], position: int
) -> tuple[TargetToken, int]:
    """What that side decides as the aggregator, and at which level of detail it could."""
    peer = other(side)
    for level in range(LAST_LEVEL + 1):
        theirs = shipped(rule, peer, laws[peer], position, level) if weights[peer] > 0 else None
        own = laws[side] if weights[side] > 0 else None
        if (decision := rule.decide(side, own, theirs, weights, position)) is not None:
            return decision, level
    raise AssertionError("the last level must settle it")


# ---- both sides alike -----------------------------------------------------------------------------------------------
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
def test_a_decision_is_the_same_whichever_side_takes_it(
    name: AggregatorName, kind: str, wide: bool, number: int, vocab: int, spread: float, cloud: float, position: int
) -> None:
    laws, weights = random_laws(number, vocab, spread), weights_of(cloud)
    rule = make_aggregator(name, SAMPLINGS[kind], wide=wide, vocab_size=vocab)
    assert rule.name == name
    decided = [settle(rule, side, laws, weights, position)[0] for side in SIDES]
    assert decided[0].token == decided[1].token
    assert all((decision.dist is None) == (name == "coin") for decision in decided)
    assert all(decision.dist is None or decision.dist.prob(decision.token) > 0 for decision in decided)


@untimed
@given(kinds, st.booleans(), st.integers(0, 2**32), st.sampled_from([0.2, 1.0, 4.0]), st.floats(0.02, 0.98))
def test_the_mixture_chooses_as_if_both_rows_were_here(
    kind: str, wide: bool, number: int, spread: float, cloud: float
) -> None:
    sampling, position = SAMPLINGS[kind], number % 1000
    laws, weights = random_laws(number, 300, spread), weights_of(cloud)
    rule = make_aggregator("mixture", sampling, wide=wide)
    mixed = mix_weighted([laws[side] for side in SIDES], [weights[side] for side in SIDES])
    truth = sample(filter_top(mixed, sampling), sampling, position)
    for side in SIDES:
        peer = other(side)
        for level in range(LAST_LEVEL + 1):  # each level by itself: none may be certain of anything else
            theirs = shipped(rule, peer, laws[peer], position, level)
            decision = rule.decide(side, laws[side], theirs, weights, position)
            assert decision is None or decision.token == truth
        assert decision is not None, "the last level always decides"


def zipf_rows(number: int, vocab: int) -> dict[Side, Dist]:
    generator = np.random.default_rng(number)
    base = -generator.uniform(1.1, 2.5) * np.log(generator.permutation(vocab) + 1.0)
    base[int(np.argmax(base))] += generator.uniform(0.0, 4.0)
    return {side: Dist.from_logits(base + generator.normal(size=vocab) * 0.7) for side in SIDES}


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
    rule, unsettled, count = make_aggregator("mixture", sampling), 0, 20
    for number in range(count):
        laws, weights = zipf_rows(number, 40_000), weights_of(0.2 + 0.02 * number)
        mixed = mix_weighted([laws[side] for side in SIDES], [weights[side] for side in SIDES])
        truth = sample(filter_top(mixed, sampling), sampling, number)
        decision, level = settle(rule, "device", laws, weights, number)
        assert decision.token == truth
        unsettled += level > 0
    assert unsettled <= most * count


def test_a_law_whose_best_ids_are_too_unlikely_for_the_wire_is_asked_for_again() -> None:
    """The noise may favour an id of probability 1e-12: its head is empty, and says nothing."""
    sampling = SamplingParams()
    rule = make_aggregator("mixture", sampling)
    nothing = rule.from_wire("cloud", Dist(np.empty(0, dtype=np.int32), np.empty(0), 1.0), None, 0, 0)
    assert nothing is not None
    own = Dist.dense(np.array([0.5, 0.3, 0.2]))
    assert rule.decide("device", own, nothing, weights_of(0.5), 0) is None
    assert rule.from_wire("cloud", nothing.head, None, 0, LAST_LEVEL) is None, "the last level must say something"
    tiny = Dist.dense(np.array([1.0 - 1e-11, 1e-11]))
    ids = [len(head.ids) for at in range(50) if (head := rule.to_wire("cloud", tiny, at).head) is not None]
    assert max(ids) == 1, "an id that 16 bits cannot hold is not shipped"


def test_without_a_law_of_its_own_a_side_takes_the_others_choice() -> None:
    weights = weights_of(1.0)
    for name in NAMES:
        for kind, sampling in SAMPLINGS.items():
            rule = make_aggregator(name, sampling, vocab_size=300)
            for number in range(20):
                laws = random_laws(number, 300, 3.0)
                alone = rule.decide("cloud", laws["cloud"], None, weights, number)
                assert alone is not None
                assert settle(rule, "device", laws, weights, number)[0].token == alone.token, (name, kind)
                assert alone.lane == "cloud"


def test_what_is_missing_is_waited_for() -> None:
    laws, weights = random_laws(1, 50, 1.0), weights_of(0.5)
    for name in ("mixture", "paper"):
        rule = make_aggregator(name, SAMPLINGS["plain"])
        share = rule.to_wire("cloud", laws["cloud"], 0)
        assert rule.decide("device", laws["device"], None, weights, 0) is None
        assert rule.decide("device", None, share, weights, 0) is None
        assert rule.from_wire("cloud", None, 3, 0, 0) is None
    assert make_aggregator("coin", SAMPLINGS["plain"]).from_wire("cloud", laws["cloud"], None, 0, 0) is None


# ---- the coin -------------------------------------------------------------------------------------------------------
def test_the_coin_needs_only_the_side_it_falls_on() -> None:
    rule, laws, weights = (
        make_aggregator("coin", SAMPLINGS["plain"]),
        random_laws(2, 50, 1.0, apart=3.0),
        weights_of(0.5),
    )
    seen = set()
    for position in range(60):
        shares = {side: rule.to_wire(side, laws[side], position) for side in SIDES}
        alone = {side: rule.decide(side, laws[side], None, weights, position) for side in SIDES}
        (fallen,) = (side for side in SIDES if alone[side] is not None)
        seen.add(fallen)
        told = rule.decide(other(fallen), None, shares[fallen], weights, position)
        both = rule.decide(fallen, laws[fallen], shares[other(fallen)], weights, position)
        assert told is not None
        assert both is not None
        assert told.token == both.token == shares[fallen].token
        assert told.lane == fallen
        agree = shares["cloud"].token == shares["device"].token
        assert both.lane == (None if agree else fallen)
        assert rule.draft_tokens(fallen, laws[fallen], weights, position, 4) == [shares[fallen].token]
        assert len(rule.draft_tokens(other(fallen), laws[other(fallen)], weights, position, 4)) == 4
        assert len(rule.draft_tokens(fallen, laws[fallen], None, position, 4)) == 4
    assert seen == set(SIDES)


# ---- laws by keyed noise --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cloud", [0.3, 0.8])
def test_targets_follow_the_mixture(name: AggregatorName, cloud: float) -> None:
    laws, weights, count = random_laws(7, 6, 1.0), weights_of(cloud), 1500
    rule = make_aggregator(name, SamplingParams(seed=11))
    counts = np.zeros(6, dtype=np.int64)
    for position in range(count):
        counts[settle(rule, "device", laws, weights, position)[0].token] += 1
    cut = {side: quantize(laws[side], top_p=0.999) for side in SIDES} if name == "paper" else laws
    probs = np.zeros(6)
    for side in SIDES:
        probs[cut[side].ids] += weights[side] * cut[side].probs / cut[side].probs.sum()
    assert_drawn_from(counts, probs)


@pytest.mark.parametrize("name", ["coin", "paper"])
def test_with_truncation_each_side_truncates_before_the_mixture(name: AggregatorName) -> None:
    sampling, count = SamplingParams(seed=5, top_k=3), 1200
    laws, weights = random_laws(9, 6, 1.0), weights_of(0.4)
    rule, counts, probs = make_aggregator(name, sampling), np.zeros(6, dtype=np.int64), np.zeros(6)
    for position in range(count):
        counts[settle(rule, "cloud", laws, weights, position)[0].token] += 1
    for side in SIDES:
        final = filter_top(laws[side], sampling)
        probs[final.ids] += weights[side] * final.probs / final.probs.sum()
    assert_drawn_from(counts, probs)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_gamma_says_whose_token_is_picked(gamma: float) -> None:
    laws, weights, count = random_laws(7, 6, 1.0), weights_of(0.5), 500
    rule, kept = make_aggregator("paper", SamplingParams(seed=2), gamma=gamma), dict.fromkeys(SIDES, 0)
    for position in range(count):
        target = settle(rule, "device", laws, weights, position)[0].token
        for side in SIDES:
            kept[side] += rule.to_wire(side, laws[side], position).token == target
    assert (kept["cloud"] > kept["device"]) == (gamma > 0.5) or gamma == 0.5


def test_equal_laws_reject_nothing_and_give_no_nan() -> None:
    law = Dist.from_logits(np.random.default_rng(1).normal(size=9))
    rule = make_aggregator("paper", SamplingParams(seed=2), gamma=1.0)
    for position in range(300):
        decision = settle(rule, "device", {"cloud": law, "device": law}, weights_of(0.3), position)[0]
        assert decision.token == rule.to_wire("cloud", law, position).token
        assert decision.lane is None


def test_at_temperature_zero_the_paper_is_the_argmax_of_the_mixture() -> None:
    for number in range(50):
        laws, weights = random_laws(number, 80, 1.0), weights_of(0.01 + number / 52)
        rule = make_aggregator("paper", SAMPLINGS["greedy"])
        mixed = mix_weighted([laws[side] for side in SIDES], [weights[side] for side in SIDES])
        assert settle(rule, "cloud", laws, weights, number)[0].token == mixed.argmax()


# ---- drafts ---------------------------------------------------------------------------------------------------------
@untimed
@given(st.sampled_from(NAMES), kinds, st.integers(0, 2**32), st.sampled_from([1, 5, 60]), st.integers(1, 9))
def test_guesses_are_distinct_possible_and_begin_with_the_draft(
    name: AggregatorName, kind: str, number: int, vocab: int, count: int
) -> None:
    law = random_laws(number, vocab, 2.0)["cloud"]
    rule = make_aggregator(name, SAMPLINGS[kind])
    guesses = rule.draft_tokens("cloud", law, None, 4, count)
    assert guesses[0] == rule.to_wire("cloud", law, 4).token
    assert len(set(guesses)) == len(guesses) <= count
    assert all(filter_top(law, SAMPLINGS[kind]).prob(token) > 0 for token in guesses)


def test_the_default_is_the_coin_unless_the_mixture_itself_is_asked_for() -> None:
    assert default_aggregator(SamplingParams(), logprobs=False, seeded=False) == "coin"
    assert default_aggregator(SamplingParams(), logprobs=True, seeded=False) == "mixture"
    assert default_aggregator(SamplingParams(), logprobs=False, seeded=True) == "mixture"
    for kind in ("top_p", "top_k", "min_p", "greedy"):
        assert default_aggregator(SAMPLINGS[kind], logprobs=False, seeded=False) == "mixture"


def test_a_clear_majority_makes_the_lane() -> None:
    laws: dict[Side, Dist] = {"cloud": Dist.dense(np.array([0.3, 0.7])), "device": Dist.dense(np.array([0.2, 0.8]))}
    assert lane_of(0, laws) is None
    laws["device"] = Dist.dense(np.array([0.1, 0.9]))
    assert lane_of(0, laws) == "cloud"
    assert lane_of(1, laws) is None
    assert lane_of(1, {"device": laws["device"]}) == "device"


def test_what_is_wide_holds_nearly_the_whole_law() -> None:
    laws = random_laws(4, 5000, 3.0)
    head = make_aggregator("mixture", SamplingParams(), wide=True).to_wire("cloud", laws["cloud"], 0).head
    assert head is not None
    assert head.tail < 0.35  # 512 ids at most
    peaked = (
        make_aggregator("mixture", SamplingParams(), wide=True)
        .to_wire("cloud", random_laws(4, 5000, 6.0)["cloud"], 0)
        .head
    )
    assert peaked is not None
    assert peaked.tail < 0.01
