"""Closed forms of the aggregators' acceptance rates and target distributions (specs 1.1, 1.6): oracles for tests.

All take the distributions that the drafts were drawn from, whole (no tail), and weights that sum to 1. Nothing is drawn
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, IdArray, ProbArray
from paceline.core.side import SIDES, Side, other
from tests.core.dists import total_variation

Dists = Mapping[Side, Dist]
Weights = Mapping[Side, float]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Probabilities that the target is the cloud's draft, the device's, both (which then are one token), or neither."""

    cloud: float
    device: float
    both: float
    neither: float


def paper_acceptance(dists: Dists, weights: Weights, gamma: float = 0.5) -> Acceptance:
    """Acceptance of Algorithm 1 with independent drafts: equation 5, and the joint probabilities that follow from it.

    gamma: probability that the cloud's token is picked.
    """
    _, probs, mixed = _aligned(dists, weights)
    delta = total_variation(dists["cloud"], dists["device"])
    picks = _picks(gamma)
    alpha = {
        side: picks[side] * (1.0 - weights[other(side)] * delta) + picks[other(side)] * float(probs[side] @ mixed)
        for side in SIDES
    }
    both = sum(picks[side] * float(np.minimum(probs[side], mixed) @ probs[other(side)]) for side in SIDES)
    return _acceptance(alpha, both)


def coin_acceptance(dists: Dists, weights: Weights) -> Acceptance:
    """Acceptance of the coin with independent drafts. The two alphas sum to 1 + P(the drafts agree)."""
    _, probs, _ = _aligned(dists, weights)
    agree = float(probs["cloud"] @ probs["device"])
    return _acceptance({side: weights[side] + weights[other(side)] * agree for side in SIDES}, agree)


def shared_coin_bound(dists: Dists, weights: Weights) -> dict[Side, float]:
    """Lower bound for the acceptance of the coin with common Gumbel noise."""
    delta = total_variation(dists["cloud"], dists["device"])
    return {side: weights[side] + weights[other(side)] * (1.0 - delta) / (1.0 + delta) for side in SIDES}


def gumbel_bound(dists: Dists, weights: Weights) -> dict[Side, float]:
    """Lower bound for the acceptance of the mixture with common Gumbel noise (Daliri, Musco, Suresh, arXiv
    2408.07978)."""
    delta = total_variation(dists["cloud"], dists["device"])
    apart = {side: weights[other(side)] * delta for side in SIDES}  # total variation between side and target
    return {side: (1.0 - apart[side]) / (1.0 + apart[side]) for side in SIDES}


def ceiling(dists: Dists) -> float:
    """Upper bound for the sum of both sides' acceptance under any aggregator."""
    return 2.0 - total_variation(dists["cloud"], dists["device"])


def paper_target_dist(dists: Dists, weights: Weights, gamma: float = 0.5) -> Dist:
    """The distribution of Algorithm 1's target, summed over drafts and coins. By Theorem 1 it is the mixture."""
    ids, probs, _ = _aligned(dists, weights)
    picks = _picks(gamma)
    target: ProbArray = np.zeros(len(ids))
    for side in SIDES:
        ours, theirs = probs[side], probs[other(side)]
        rejected = weights[other(side)] * np.maximum(ours - theirs, 0.0)  # drafted and rejected
        more = np.maximum(theirs - ours, 0.0)
        missing = float(more.sum())
        recovered = float(rejected.sum()) * more / missing if missing > 0.0 else np.zeros(len(ids))
        target += picks[side] * (ours - rejected + recovered)
    return Dist(ids, target)


def _acceptance(alpha: Mapping[Side, float], both: float) -> Acceptance:
    neither = 1.0 - alpha["cloud"] - alpha["device"] + both
    return Acceptance(alpha["cloud"], alpha["device"], both, neither)


def _picks(gamma: float) -> dict[Side, float]:
    return {"cloud": gamma, "device": 1.0 - gamma}


def _aligned(dists: Dists, weights: Weights) -> tuple[IdArray, dict[Side, ProbArray], ProbArray]:
    """(n,) the union of ids, each side's probabilities on it, and the mixture's."""
    ids = np.union1d(dists["cloud"].ids, dists["device"].ids)
    probs: dict[Side, ProbArray] = {}
    for side in SIDES:
        probs[side] = np.zeros(len(ids))
        probs[side][np.searchsorted(ids, dists[side].ids)] = dists[side].probs
    mixed = mix_weighted([Dist(ids, probs[side]) for side in SIDES], [weights[side] for side in SIDES])
    return ids, probs, mixed.probs
