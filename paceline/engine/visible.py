"""Which rows a row may see: the tree mask of a segment behind the committed prefix, narrowed by a sliding window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import Segment


def visible(segment: Segment, window: int | None) -> NDArray[np.bool_]:
    """(n, start + n): may new row i see row j? A window counts positions, the row's own included.

    Committed rows are a chain, so row j stands at position j; the rows of a tree, those cached before included, stand
    at their depth.
    """
    n, committed = len(segment.tokens), segment.start - segment.open_rows
    seen = np.ones((n, segment.start + n), dtype=np.bool_)
    seen[:, committed:] = segment.mask()
    if window is not None:
        positions = np.asarray(segment.positions())
        columns = np.concatenate((np.arange(committed), segment.tree_positions()))
        seen &= positions[:, None] - columns[None, :] < window
    return seen
