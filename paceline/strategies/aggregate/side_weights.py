"""How much each side counts after a prefix: eta of DRAGON eq. 4, from what both sides' documents weigh (log h).

Log h is told once, or, where scores follow the text, comes with every law.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.aggregation.weights import side_weights
from paceline.core.side import Side, other
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode


class SideWeights:
    """One side's view. `decoder`: of this side; it says what this side's documents weigh."""

    def __init__(self, side: Side, decoder: BranchDecoder, *, rescoring: bool) -> None:
        self._side = side
        self._decoder = decoder
        self._rescoring = rescoring
        self.reset_peer()

    def reset_peer(self) -> None:
        """Nothing is known of the peer (any more)."""
        self.peer_known = False
        self._theirs: float | None = None
        self._fixed: Mapping[Side, float] | None = None  # where scores stay what they were

    def receive(self, log_h: float | None) -> None:
        """What the peer's documents weigh together at the beginning; None: it found none."""
        self._theirs, self.peer_known = log_h, True

    @property
    def has_documents(self) -> bool:
        """Does either side read any?"""
        return self._theirs is not None or self._decoder.log_evidence is not None

    def at(self, node: PrefixNode) -> Mapping[Side, float] | None:
        """eta of both sides after this prefix, summing to 1; None while it is not known."""
        if not (self.peer_known and self._decoder.started):
            return None  # what a side has found is not known before it has searched
        ours, peer = self._decoder.log_evidence, other(self._side)
        if not self._rescoring or ours is None or self._theirs is None:  # one without documents leaves the other all
            if self._fixed is None:
                self._fixed = side_weights({self._side: ours, peer: self._theirs})
            return self._fixed
        told = None if node.peer_dist is None else node.peer_dist.log_evidence
        if node.log_evidence is None or told is None:
            return None
        return side_weights({self._side: node.log_evidence, peer: told})
