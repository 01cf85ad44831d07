"""Which rows a row may see: the tree mask of a segment behind its cached prefix, narrowed by a sliding window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.segments import Segment


def visible(segment: Segment, window: int | None) -> NDArray[np.bool_]:
    """(n, start + n): may new row i see row j? A window counts positions, the row's own included.

    Cached rows are a chain, so row j < start stands at position j; the segment's own rows stand at their depth.
    """
    n = len(segment.tokens)
    seen = np.ones((n, segment.start + n), dtype=np.bool_)
    seen[:, segment.start :] = segment.mask()
    if window is not None:
        positions = np.asarray(segment.positions())
        columns = np.concatenate((np.arange(segment.start), positions))
        seen &= positions[:, None] - columns[None, :] < window
    return seen
