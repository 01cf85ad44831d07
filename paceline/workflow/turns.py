"""Turns of owners on the units: whoever asks for more workflows at once than others gets no more of the units for it.

Start-time fair queueing over the predicted seconds of launches: each owner has a clock of what it was given, and those
that are behind come first. One that comes anew begins with the clock of whoever is furthest behind, so nobody saves up
turns. Alone, an owner's sub-stages go by their criticality, as without this. Not handled: a launch under way is not
ended for another owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.workflow.graph import SubStage, SubStageId


class OwnerTurns:
    def __init__(self) -> None:
        self._given: dict[str, float] = {}  # owners with unfinished sub-stages -> s

    def __len__(self) -> int:
        return len(self._given)

    def see(self, owners: set[str]) -> None:
        """Owners that have unfinished sub-stages now; others are forgotten."""
        kept = {owner: given for owner, given in self._given.items() if owner in owners}
        least = min(kept.values(), default=0.0)
        self._given = kept | dict.fromkeys(owners - set(kept), least)

    def give(self, owner: str, seconds: float) -> None:
        """A launch of that owner has begun, which takes so long."""
        self._given[owner] = self._given.get(owner, 0.0) + seconds

    def ordered(self, nodes: Sequence[SubStage], ranks: Mapping[SubStageId, float]) -> list[SubStage]:
        """Each owner's first one, then each owner's second one, and so on; of one place, who was given least first.

        nodes: each owner's in its own order.
        """
        if len(self._given) < 2:
            return list(nodes)
        places: dict[str, int] = {}
        keys: dict[SubStageId, tuple[int, float, float]] = {}
        for node in nodes:
            place = places[node.owner] = places.get(node.owner, -1) + 1
            keys[node.id] = place, self._given.get(node.owner, 0.0), -ranks[node.id]
        return sorted(nodes, key=lambda node: keys[node.id])
