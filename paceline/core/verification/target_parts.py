"""A target distribution in two parts: a head that few bytes carry exactly to the drafter, and a rest that stays.

target = head + rest, id by id. A coin that knows no draft says which part the token is of, with the probability of its
mass; in the rest the target's side draws it alone, in the head it is verified, and recovered by the drafter, under the
head renormalised. So the token follows the whole target distribution, and no row of a vocabulary travels (specs 7.3,
lazy tail).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.core.sampling.dist import Dist, best_indices
from paceline.core.sampling.quantize import quantize

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
