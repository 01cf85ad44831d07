"""Closed forms against vectors by hand (specs 8), enumeration and the aggregators themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.aggregation.aggregators import AggregatorName, OwnDist, make_aggregator
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side, other
from tests.core.acceptance_oracle import (
    Acceptance,
    ceiling,
    coin_acceptance,
    gumbel_bound,
    paper_acceptance,
    paper_target_dist,
    shared_coin_bound,
)

pytestmark = pytest.mark.slow

TWO: dict[Side, Dist] = {"cloud": Dist.dense(np.array([0.8, 0.2])), "device": Dist.dense(np.array([0.4, 0.6]))}
HALVES: dict[Side, float] = {"cloud": 0.5, "device": 0.5}


def dists_of(number: int, vocab: int, zeros: bool) -> dict[Side, Dist]:
    generator = np.random.default_rng(number)
    dists: dict[Side, Dist] = {}
    for side in SIDES:
        probs = generator.dirichlet(np.full(vocab, 0.6))
        if zeros:
            probs[generator.random(vocab) < 0.3] = 0.0
            probs[int(generator.integers(vocab))] += 0.1
        dists[side] = Dist.dense(probs / probs.sum())
    return dists


cases = st.tuples(st.integers(0, 2**32), st.integers(2, 6), st.booleans(), st.floats(0, 1))
untimed = settings(deadline=None, max_examples=60)


def test_the_vector_by_hand() -> None:
    mixed = mix_weighted([TWO[side] for side in SIDES], [0.5, 0.5])
    assert mixed.probs == pytest.approx([0.6, 0.4])
    half = paper_acceptance(TWO, HALVES)
    assert (half.cloud, half.device, half.both, half.neither) == pytest.approx((0.68, 0.64, 0.38, 0.06))
    always_device = paper_acceptance(TWO, HALVES, gamma=0.0)
    assert (always_device.device, always_device.cloud) == pytest.approx((0.80, 0.56))
    coin = coin_acceptance(TWO, HALVES)
    assert (coin.cloud, coin.device) == pytest.approx((0.72, 0.72))
    assert ceiling(TWO) == pytest.approx(1.6)
    assert gumbel_bound(TWO, HALVES)["cloud"] == pytest.approx(0.8 / 1.2)


def measured(name: AggregatorName, count: int) -> Acceptance:
    aggregator, hits = make_aggregator(name, SamplingParams(seed=17)), np.zeros(4)
    for position in range(count):
        sent = {side: aggregator.to_wire(side, OwnDist.of(TWO[side]), position) for side in SIDES}
        target_token = aggregator.decide(
            "cloud",
            OwnDist.of(TWO["cloud"]),
            aggregator.to_wire("device", OwnDist.of(TWO["device"]), position, 2),
            HALVES,
            position,
        )
        assert target_token is not None
        cloud, device = (sent[side].token == target_token.token for side in SIDES)
        hits += (cloud, device, cloud and device, not cloud and not device)
    return Acceptance(*(float(hit) / count for hit in hits))


@pytest.mark.parametrize(
    ("name", "cloud", "device", "both"),
    # Two tokens: common noise couples them as well as can be, the mixture .80/.80 by hand, the coin 1 - delta / 2.
    [("paper", 0.68, 0.64, 0.38), ("mixture", 0.8, 0.8, 0.6), ("coin", 0.8, 0.8, 0.6)],
)
def test_the_aggregators_accept_as_the_vector_says(
    name: AggregatorName, cloud: float, device: float, both: float
) -> None:
    seen = measured(name, 4000)
    assert (seen.cloud, seen.device, seen.both) == pytest.approx((cloud, device, both), abs=0.03)


def enumerate_paper(dists: dict[Side, Dist], weights: dict[Side, float], gamma: float) -> tuple[np.ndarray, Acceptance]:
    """Algorithm 1 as it is written, enumerated over drafts and coins."""
    vocab, target, hits = len(dists["cloud"].ids), np.zeros(len(dists["cloud"].ids)), np.zeros(4)

    def outcomes(side: Side, draft: int) -> list[tuple[int, float]]:
        ours, theirs = dists[side].probs, dists[other(side)].probs
        if ours[draft] <= theirs[draft]:
            return [(draft, 1.0)]
        reject = weights[other(side)] * (1 - theirs[draft] / ours[draft])
        residual = np.maximum(theirs - ours, 0.0)
        residual /= residual.sum()
        return [(draft, 1 - reject), *((token, reject * float(residual[token])) for token in range(vocab))]

    for cloud in range(vocab):
        for device in range(vocab):
            drawn = float(dists["cloud"].probs[cloud] * dists["device"].probs[device])
            if drawn == 0.0:
                continue
            for side, picked in (("cloud", gamma), ("device", 1 - gamma)):
                for token, chance in outcomes(side, cloud if side == "cloud" else device):  # type: ignore[arg-type]  # a Side
                    mass = drawn * picked * chance
                    target[token] += mass
                    same = (token == cloud, token == device)
                    hits += np.array([*same, all(same), not any(same)]) * mass
    return target, Acceptance(*hits.tolist())


@untimed
@given(cases, st.sampled_from([0.0, 0.5, 0.7, 1.0]))
def test_algorithm_1_has_the_mixtures_distribution_and_the_closed_forms(
    case: tuple[int, int, bool, float], gamma: float
) -> None:
    number, vocab, zeros, cloud = case
    dists, weights = dists_of(number, vocab, zeros), {"cloud": cloud, "device": 1 - cloud}
    mixed = mix_weighted([dists[side] for side in SIDES], [weights[side] for side in SIDES])
    target, seen = enumerate_paper(dists, weights, gamma)  # type: ignore[arg-type]  # keys are sides
    assert np.abs(target - mixed.probs).max() < 1e-12
    assert np.abs(paper_target_dist(dists, weights, gamma).probs - mixed.probs).max() < 1e-12  # type: ignore[arg-type]  # likewise
    closed = paper_acceptance(dists, weights, gamma)  # type: ignore[arg-type]  # likewise
    assert (closed.cloud, closed.device, closed.both, closed.neither) == pytest.approx(
        (seen.cloud, seen.device, seen.both, seen.neither), abs=1e-12
    )


@untimed
@given(cases)
def test_the_coin_has_the_mixtures_distribution_and_the_closed_forms(case: tuple[int, int, bool, float]) -> None:
    number, vocab, zeros, cloud = case
    dists = dists_of(number, vocab, zeros)
    weights: dict[Side, float] = {"cloud": cloud, "device": 1 - cloud}
    mixed = mix_weighted([dists[side] for side in SIDES], [weights[side] for side in SIDES])
    target, hits = np.zeros(vocab), np.zeros(4)
    for drawn_cloud in range(vocab):
        for drawn_device in range(vocab):
            drafts: dict[Side, int] = {"cloud": drawn_cloud, "device": drawn_device}
            chance = float(dists["cloud"].probs[drawn_cloud] * dists["device"].probs[drawn_device])
            for side in SIDES:
                target[drafts[side]] += chance * weights[side]
                same = [drafts[each] == drafts[side] for each in SIDES]
                hits += np.array([*same, all(same), not any(same)]) * chance * weights[side]
    assert np.abs(target - mixed.probs).max() < 1e-12
    closed = coin_acceptance(dists, weights)
    assert (closed.cloud, closed.device, closed.both, closed.neither) == pytest.approx(hits.tolist(), abs=1e-12)


@untimed
@given(cases)
def test_the_coin_accepts_no_less_than_the_paper_and_no_more_than_the_ceiling(
    case: tuple[int, int, bool, float],
) -> None:
    number, vocab, zeros, cloud = case
    dists = dists_of(number, vocab, zeros)
    weights: dict[Side, float] = {"cloud": cloud, "device": 1 - cloud}
    paper, coin, most = paper_acceptance(dists, weights), coin_acceptance(dists, weights), ceiling(dists) + 1e-12
    assert paper.cloud + paper.device <= coin.cloud + coin.device + 1e-12
    assert coin.cloud + coin.device <= most
    assert paper.cloud + paper.device <= most
    assert sum(gumbel_bound(dists, weights).values()) <= most
    assert sum(shared_coin_bound(dists, weights).values()) <= most


@pytest.mark.parametrize(("name", "bound"), [("mixture", gumbel_bound), ("coin", shared_coin_bound)])
def test_common_noise_keeps_its_bound(name: AggregatorName, bound: type) -> None:
    dists = dists_of(3, 6, zeros=False)
    weights: dict[Side, float] = {"cloud": 0.35, "device": 0.65}
    aggregator, count, accepted = make_aggregator(name, SamplingParams(seed=23)), 2000, dict.fromkeys(SIDES, 0)
    for position in range(count):
        target_token = aggregator.decide(
            "cloud",
            OwnDist.of(dists["cloud"]),
            aggregator.to_wire("device", OwnDist.of(dists["device"]), position, 2),
            weights,
            position,
        )
        assert target_token is not None
        for side in SIDES:
            accepted[side] += aggregator.to_wire(side, OwnDist.of(dists[side]), position).token == target_token.token
    least = bound(dists, weights)
    assert all(accepted[side] / count >= least[side] - 0.025 for side in SIDES)
    assert sum(accepted.values()) / count <= ceiling(dists) + 0.03
