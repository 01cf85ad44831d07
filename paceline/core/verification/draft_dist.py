"""The distribution that a draft is drawn from, on a grid that few bytes carry exactly.

Accept-or-reject verification is exact only under the very distribution that the draft was drawn from (specs 7.2), so
it is rounded first, drawn from, and sent as it is. `POINTS` points lie evenly on the cumulative distribution; a token's
probability is the share of points that fall on it. So probabilities are multiples of 1 / `POINTS` and sum to exactly 1,
tokens too unlikely for a point of their own keep their mass together, and one number of 16 bits carries any of them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist, best_indices
from paceline.core.sampling.sampler import SamplingParams, filter_top

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
