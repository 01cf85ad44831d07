"""Which of a side's documents decided a token: those whose share of its probability in the mixture is a large one.

A citation needs a document that decided a token against another one. Where all give a token about as much, as with most
words of any sentence, it tells nothing of any of them. Penalties and temperature are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LEAST_SHARE: Final = 0.5  # of the greatest share: below, a document has been outvoted


def deciders(log_weights: Sequence[float], probs: Sequence[float]) -> frozenset[int] | None:
    """Indices of the branches that decided a token; None where all did, or the one there is.

    log_weights: (branches,) before the softmax; probs: (branches,) the token's in each.
    """
    if len(probs) < 2:
        return None
    top = max(log_weights)
    shares = [math.exp(weight - top) * prob for weight, prob in zip(log_weights, probs, strict=True)]
    least = LEAST_SHARE * max(shares)
    found = frozenset(index for index, share in enumerate(shares) if share >= least)
    return None if len(found) == len(shares) else found
