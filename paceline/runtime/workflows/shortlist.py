"""Which of what a workflow has found is read: the best of a search, and the answer's list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from paceline.core.side import Side
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.rerank import best_first

MAX_READ: Final = 4  # passages of the answer, of each side's documents and of the web


@dataclass(frozen=True, slots=True)
class Found:
    """A passage, and whose it is."""

    passage: Passage
    side: Side
    private: bool
    web: bool = False  # it is what a search of the web has found, a page or a passage of the cloud's documents


class Claims:
    """Passages of a workflow's lookups, each once: those of one side that say the same are one, whatever found them."""

    def __init__(self) -> None:
        self._taken: set[tuple[Side, str]] = set()

    def take(self, found: Sequence[Found]) -> list[Found]:
        """Those that were not taken before."""
        said = {(each.side, " ".join(passages_text(each.passage).split())): each for each in found}
        new = {key: each for key, each in said.items() if key not in self._taken}
        self._taken |= set(new)
        return list(new.values())


@dataclass(slots=True)
class Shortlist:
    """Passages that are reranked together, a part at a time. searches: that find them and have not ended."""

    searches: int = 1
    found: list[Found] = field(default_factory=list)
    _scores: dict[int, float] = field(default_factory=dict)  # by place in `found`

    def take(self, found: Sequence[Found]) -> bool:
        """A search has found these. Whether it was the last one."""
        self.found += found
        self.searches -= 1
        return self.searches <= 0

    def score(self, first: int, scores: Sequence[float]) -> None:
        self._scores |= dict(enumerate(map(float, scores), first))

    @property
    def is_ranked(self) -> bool:
        """Nothing more will be found, and all that was has a score."""
        return self.searches <= 0 and len(self._scores) == len(self.found)

    @property
    def scores(self) -> list[float]:
        """Of all that was found. Valid when it is ranked."""
        return [self._scores[place] for place in range(len(self.found))]


def best_of(lists: Sequence[Shortlist], count: int) -> list[Found]:
    """The best so many of ranked shortlists, best first."""
    found = [each for ranked in lists for each in ranked.found]
    scores = np.array([score for ranked in lists for score in ranked.scores])
    return [found[place] for place in best_first(scores)[:count]]


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
