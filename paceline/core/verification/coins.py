"""Acceptance of drafts, and tokens in place of rejected ones: Leviathan et al. 2023, Algorithm 1, a place at a time.

All coins are functions of seed, position and purpose, independent of each other and of the common noise that tokens
are sampled with. Positions are those of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.core.sampling.dist import Dist, ProbArray
from paceline.core.sampling.noise import uniform

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
        return int(dist.ids[_inverse(dist.probs, uniform(self.seed, position, purpose))])

    def recover(self, position: int, draft_dist: Dist, target_dist: Dist) -> int:
        """A token of the residual distribution, max(target - draft, 0) renormalised, for a rejected draft."""
        ids = np.union1d(draft_dist.ids, target_dist.ids)
        draft, target = _over(ids, draft_dist), _over(ids, target_dist)
        residual = np.maximum(target - draft, 0.0)
        if not residual.sum() > 0.0:  # equal up to rounding, where a rejection has probability 0 up to rounding
            residual = target
        return int(ids[_inverse(residual, uniform(self.seed, position, "recover"))])


def prob_of(dist: Dist, token: int) -> float:
    """Probability of a token, with the mass that the distribution keeps as the whole."""
    index = dist.index(token)
    return 0.0 if index is None else float(dist.probs[index]) / float(dist.probs.sum())


def _over(ids: np.ndarray, dist: Dist) -> ProbArray:
    """Renormalised, over these ids, which hold the distribution's own."""
    probs = np.zeros(len(ids))
    probs[np.searchsorted(ids, dist.ids)] = dist.probs / dist.probs.sum()
    return probs


def _inverse(probs: ProbArray, u: float) -> int:
    """Index of the outcome that holds the share `u` of the mass, never one without mass. Raises ValueError without
    any."""
    sums = np.cumsum(probs)
    if len(sums) == 0 or not sums[-1] > 0.0:
        raise ValueError("no token has a probability above 0")
    return int(np.searchsorted(sums, u * sums[-1], side="right").clip(max=int(np.flatnonzero(probs)[-1])))
