"""Which of what a workflow has found its answer reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.side import Side
from paceline.rag.records import Passage
from paceline.runtime.workflows.lookup import Found

MAX_READ: Final = 4  # passages of the answer, of each side's documents and of the web


def reading_list(found: Sequence[Found], side: Side) -> tuple[tuple[Passage, ...], tuple[Passage, ...]]:
    """Passages of this side and of the other one, the best of each origin by their scores, in the order they were
    found."""
    origins: dict[tuple[bool, bool], list[int]] = {}
    for place, each in enumerate(found):
        origins.setdefault((each.side != side, each.web), []).append(place)
    kept = sorted(
        place
        for places in origins.values()
        for place in sorted(places, key=lambda at: (-found[at].passage.score, at))[:MAX_READ]
    )
    own = tuple(found[place].passage for place in kept if found[place].side == side)
    return own, tuple(found[place].passage for place in kept if found[place].side != side)
