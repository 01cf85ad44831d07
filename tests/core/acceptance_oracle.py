"""Closed forms: how often each aggregator accepts both sides' drafts, and which law its target has (specs 1.1, 1.6).

Oracles for tests and benches, and what a placement can be planned with. All take the laws the drafts were drawn from,
whole (no tail), and weights that sum to 1; nothing here draws anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, IdArray, ProbArray, total_variation
from paceline.core.side import SIDES, Side, other

Laws = Mapping[Side, Dist]
Weights = Mapping[Side, float]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Probabilities that the target is the cloud's draft, the device's, both (which then are one token), or neither."""

    cloud: float
    device: float
    both: float
    neither: float


def paper_acceptance(laws: Laws, weights: Weights, gamma: float = 0.5) -> Acceptance:
    """Of Algorithm 1 with independent drafts: equation 5, and the joint probabilities that follow from it.

    gamma: with what probability the cloud's token is picked.
    """
    _, probs, mixed = _aligned(laws, weights)
    delta = total_variation(laws["cloud"], laws["device"])
    picks = _picks(gamma)
    alpha = {
        side: picks[side] * (1.0 - weights[other(side)] * delta) + picks[other(side)] * float(probs[side] @ mixed)
        for side in SIDES
    }
    both = sum(picks[side] * float(np.minimum(probs[side], mixed) @ probs[other(side)]) for side in SIDES)
    return _acceptance(alpha, both)


def coin_acceptance(laws: Laws, weights: Weights) -> Acceptance:
    """Of the coin with independent drafts. The two alphas sum to 1 + the probability that the drafts agree."""
    _, probs, _ = _aligned(laws, weights)
    agree = float(probs["cloud"] @ probs["device"])
    return _acceptance({side: weights[side] + weights[other(side)] * agree for side in SIDES}, agree)


def shared_coin_bound(laws: Laws, weights: Weights) -> dict[Side, float]:
    """Least acceptance of the coin where both sides draft with the same Gumbel noise."""
    delta = total_variation(laws["cloud"], laws["device"])
    return {side: weights[side] + weights[other(side)] * (1.0 - delta) / (1.0 + delta) for side in SIDES}


def gumbel_bound(laws: Laws, weights: Weights) -> dict[Side, float]:
    """Least acceptance of the mixture by common Gumbel noise (Daliri, Musco, Suresh, arXiv 2408.07978)."""
    delta = total_variation(laws["cloud"], laws["device"])
    apart = {side: weights[other(side)] * delta for side in SIDES}  # total variation of the side's law and the target's
    return {side: (1.0 - apart[side]) / (1.0 + apart[side]) for side in SIDES}


def ceiling(laws: Laws) -> float:
    """No rule of whatever kind accepts more than this of both sides' drafts together."""
    return 2.0 - total_variation(laws["cloud"], laws["device"])


def paper_law(laws: Laws, weights: Weights, gamma: float = 0.5) -> Dist:
    """The law of Algorithm 1's target by summing over drafts and coins. Theorem 1 says that it is the mixture."""
    ids, probs, _ = _aligned(laws, weights)
    picks = _picks(gamma)
    law: ProbArray = np.zeros(len(ids))
    for side in SIDES:
        ours, theirs = probs[side], probs[other(side)]
        rejected = weights[other(side)] * np.maximum(ours - theirs, 0.0)  # drafted and rejected
        more = np.maximum(theirs - ours, 0.0)
        missing = float(more.sum())
        recovered = float(rejected.sum()) * more / missing if missing > 0.0 else np.zeros(len(ids))
        law += picks[side] * (ours - rejected + recovered)
    return Dist(ids, law)


def _acceptance(alpha: Mapping[Side, float], both: float) -> Acceptance:
    neither = 1.0 - alpha["cloud"] - alpha["device"] + both
    return Acceptance(alpha["cloud"], alpha["device"], both, neither)


def _picks(gamma: float) -> dict[Side, float]:
    return {"cloud": gamma, "device": 1.0 - gamma}


def _aligned(laws: Laws, weights: Weights) -> tuple[IdArray, dict[Side, ProbArray], ProbArray]:
    """(n,) the union of ids, each side's probabilities on it, and the mixture's."""
    ids = np.union1d(laws["cloud"].ids, laws["device"].ids)
    probs: dict[Side, ProbArray] = {}
    for side in SIDES:
        probs[side] = np.zeros(len(ids))
        probs[side][np.searchsorted(ids, laws[side].ids)] = laws[side].probs
    mixed = mix_weighted([Dist(ids, probs[side]) for side in SIDES], [weights[side] for side in SIDES])
    return ids, probs, mixed.probs
