"""Weights of both sides after a prefix: eta of DRAGON eq. 4, from the summed weights of their documents (log h).

A side's log h is sent once, or, where scores follow the text, comes with every distribution.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.aggregation.weights import side_weights
from paceline.core.side import Side, other
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode


class SideWeights:
    """Weights as one side knows them. decoder: this side's, for the weight of its documents. writer: the side that
    counts alone where neither reads documents; None: both do."""

    def __init__(self, side: Side, decoder: BranchDecoder, *, rescoring: bool, writer: Side | None) -> None:
        self._side = side
        self._peer_side = other(side)
        self._decoder = decoder
        self._rescoring = rescoring
        self._writer = writer
        self.reset_peer()

    def reset_peer(self) -> None:
        """Forget the peer's weight."""
        self.peer_known = False
        self._peer_log_h: float | None = None
        self._fixed: Mapping[Side, float] | None = None  # where scores do not follow the text

    def receive(self, log_h: float | None) -> None:
        """Set the peer's summed weight at the beginning of the answer; None: it found no document."""
        self._peer_log_h, self.peer_known = log_h, True

    @property
    def has_documents(self) -> bool:
        """Either side reads documents."""
        return self._peer_log_h is not None or self._decoder.log_evidence is not None

    @property
    def has_own_documents(self) -> bool:
        return self._decoder.log_evidence is not None

    def at(self, node: PrefixNode) -> Mapping[Side, float] | None:
        """eta of both sides after this prefix, summing to 1; None while it is not known."""
        if not (self.peer_known and self._decoder.started):
            return None  # a side's documents are not known before it has searched
        own_log_h = self._decoder.log_evidence
        if not self._rescoring or own_log_h is None or self._peer_log_h is None:  # without documents: weight 0
            if self._fixed is None:
                log_h = {self._side: own_log_h, self._peer_side: self._peer_log_h}
                if self._writer is not None and not self.has_documents:
                    log_h[self._writer] = 0.0
                self._fixed = side_weights(log_h)
            return self._fixed
        peer_log_h = None if node.peer_dist is None else node.peer_dist.log_evidence
        if node.log_evidence is None or peer_log_h is None:
            return None
        return side_weights({self._side: node.log_evidence, self._peer_side: peer_log_h})
