"""Verification of drafts against the target model's distributions, exact in distribution.

| verifier | the drafter sends for each draft | drawn from | a rejection costs |
|---|---|---|---|
| agreement | the token | anything at all | nothing: the target's own token is known |
| rejection | the token and its draft probability | the draft distribution | a target distribution to the drafter |
| truncated | the token and its truncated distribution | that distribution | nothing |

*Agreement* samples the target's own token with noise that both sides have in common, and goes on as long as the draft
is that token: greedy matching is its case at temperature 0, and the text is the target model's own for the same seed.
*Rejection* (as in DSSD) and *truncated* (GELATO) are Leviathan et al. 2023, Algorithm 1: the text has the target's
distribution, but is another one for the same seed.

Distributions are final: after temperature, penalties, mask, top-k, top-p and min-p; their mass is what they keep, and
the rest is never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist, ProbArray, best_indices, quantize, uniform
from paceline.core.sampling.sampler import SamplingParams, filter_top

# Acceptance of drafts, and tokens in place of rejected ones: Leviathan et al. 2023, Algorithm 1, a place at a time.
#
# All coins are functions of seed, position and purpose, independent of each other and of the common noise that tokens
# are sampled with. Positions are those of the output.


Purpose = Literal["draft", "recover", "rest"]


@dataclass(frozen=True, slots=True)
class Coins:
    """Coins of one answer."""

    seed: int

    def accepts(self, position: int, draft_prob: float, target_prob: float) -> bool:
        """With probability min(1, target ÷ draft). A draft that the draft distribution cannot give is rejected."""
        return draft_prob > 0.0 and uniform(self.seed, position, "accept") * draft_prob < target_prob

    def happens(self, position: int, prob: float) -> bool:
        """With this probability: the token is of the part of the target that the drafter does not see."""
        return uniform(self.seed, position, "part") < prob

    def draw(self, position: int, dist: Dist, purpose: Purpose) -> int:
        """A token of this distribution, by its inverse distribution function over ascending ids."""
        return drawn(dist, uniform(self.seed, position, purpose))

    def recover(self, position: int, draft_dist: Dist, target_dist: Dist) -> int:
        """A token of the residual distribution, max(target - draft, 0) renormalised, for a rejected draft."""
        target = renormalised(target_dist)
        residual = excess(target, renormalised(draft_dist))
        # Equal up to rounding, where a rejection has probability 0 up to rounding, they leave nothing.
        return self.draw(position, residual if residual.probs.any() else target, "recover")


def prob_of(dist: Dist, token: int) -> float:
    """Probability of a token, with the mass that the distribution keeps as the whole."""
    found = dist.prob(token)
    return found / float(dist.probs.sum()) if found else 0.0


def renormalised(dist: Dist) -> Dist:
    """The distribution scaled to sum to 1 without its tail. Raises ValueError if no id has a probability above 0."""
    total = float(dist.probs.sum())
    if not total > 0.0:
        raise ValueError("a distribution without any token")
    return Dist(dist.ids, dist.probs / total)


def excess(more: Dist, less: Dist) -> Dist:
    """The residual (more - less)_+ on the ids of `more`, not normalised; all zeros if the two are equal."""
    places = np.searchsorted(less.ids, more.ids)
    inside = places < len(less.ids)
    inside[inside] = less.ids[places[inside]] == more.ids[inside]
    probs: ProbArray = more.probs.copy()
    probs[inside] -= less.probs[places[inside]]
    return Dist(more.ids, np.maximum(probs, 0.0))


def drawn(dist: Dist, u: float) -> int:
    """The token that holds the share `u` of the mass, in the order of ids, never one without mass. Raises ValueError
    without any. u: in (0, 1)."""
    sums = np.cumsum(dist.probs)
    if len(sums) == 0 or not sums[-1] > 0.0:
        raise ValueError("no token has a probability above 0")
    at = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return int(dist.ids[min(at, int(np.flatnonzero(dist.probs)[-1]))])


# The distribution that a draft is drawn from, on a grid that few bytes carry exactly.
#
# Accept-or-reject verification is exact only under the very distribution that the draft was drawn from, so it is
# rounded first, drawn from, and sent as it is. `POINTS` points lie evenly on the cumulative distribution; a token's
# probability is the share of points that fall on it. So probabilities are multiples of 1 / `POINTS` and sum to exactly
# 1, tokens too unlikely for a point of their own keep their mass together, and one number of 16 bits carries any of
# them.


POINTS: Final = 1 << 16


def draft_dist(final: Dist, *, mass: float = 1.0, max_ids: int | None = None) -> Dist:
    """The nearest distribution on the grid: each probability changes by less than 1 / `POINTS`.

    mass: only the fewest ids that have so much of it are kept (top-p); max_ids: and no more than these. Raises
    ValueError if no id has a probability above 0.
    """
    kept = final
    if mass < 1.0:  # of what the distribution keeps, not of its tail
        kept = filter_top(Dist(final.ids, final.probs / final.probs.sum()), SamplingParams(top_p=mass))
    if max_ids is not None and len(kept.ids) > max_ids:
        kept = kept.kept_at(np.sort(best_indices(kept.probs, max_ids)))
    sums = np.cumsum(kept.probs)
    if len(sums) == 0 or not sums[-1] > 0.0:
        raise ValueError("no token has a probability above 0")
    ends = np.floor(sums / sums[-1] * POINTS + 0.5).astype(np.int64)
    counts = np.diff(ends, prepend=0)
    places = np.flatnonzero(counts)
    return Dist(kept.ids[places], counts[places] / POINTS)


def counts_of(dist: Dist) -> NDArray[np.int64]:
    """(kept,) points of each id of a distribution that `draft_dist` has made."""
    return (dist.probs * POINTS).astype(np.int64)


VerifierName = Literal["agreement", "rejection", "truncated"]


# A target distribution in two parts: a head that few bytes carry exactly to the drafter, and a rest that stays.
#
# target = head + rest, id by id. A coin that knows no draft says which part the token is of, with the probability of
# its mass; in the rest the target's side draws it alone, in the head it is verified, and recovered by the drafter,
# under the head renormalised. So the token follows the whole target distribution, and no row of a vocabulary travels.


HEAD_IDS: Final = 1024
HEAD_MASS: Final = 0.999  # of the target; a draft of the rest is hardly ever accepted


@dataclass(frozen=True, slots=True)
class TargetParts:
    head: Dist  # probabilities of the whole target; what they lack of 1 is its tail
    rest: Dist  # likewise

    @property
    def rest_mass(self) -> float:
        return float(self.rest.probs.sum())

    @staticmethod
    def of(final: Dist, *, precise: bool = False) -> TargetParts:
        """precise: the head's probabilities are the target's own, in float64; else in 16 bits, rounded down.

        final: with mass above 0.
        """
        probs = final.probs / final.probs.sum()
        places = np.sort(best_indices(probs, HEAD_IDS))
        head = quantize(Dist(final.ids[places], probs[places]), top_p=HEAD_MASS)
        at = np.searchsorted(final.ids, head.ids)
        if precise:
            kept = np.minimum(probs[at], 1.0)
            head = Dist(head.ids, kept, max(0.0, 1.0 - float(kept.sum())))
        rest = probs.copy()
        rest[at] = np.maximum(rest[at] - head.probs, 0.0)
        return TargetParts(head, Dist(final.ids, rest))
