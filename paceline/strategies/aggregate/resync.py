"""Recovery of lost messages: a link loses none, but a link that breaks and heals does.

A side without progress sends its state, and the peer sends again what is missing there.
"""

from __future__ import annotations

from paceline.strategies.aggregate.deciding import Decider
from paceline.strategies.aggregate.following import DraftSender
from paceline.strategies.aggregate.side_weights import SideWeights
from paceline.strategies.aggregate.state import Answer, PeerState
from paceline.strategies.base import Effect, Send
from paceline.strategies.decoding.prefix_tree import PrefixTree
from paceline.wire.messages import SyncState

SYNC_INTERVAL_S = 1.0


class Resync:
    """Compares the state of both sides of one `PeerState`, when time passes without progress."""

    def __init__(
        self,
        answer: Answer,
        peer: PeerState,
        tree: PrefixTree,
        weights: SideWeights,
        decider: Decider,
        sender: DraftSender,
    ) -> None:
        self._answer = answer
        self._peer = peer
        self._tree = tree
        self._weights = weights
        self._decider = decider
        self._sender = sender
        self._next: float | None = None  # s, when to look at the progress again
        self._resent_drafts = False  # since that was done last

    def wake(self, now: float) -> list[Effect]:
        """Every second without a target: send this side's state."""
        if self._next is not None and now < self._next:
            return []
        begins = self._next is None  # the first targets may be on their way
        self._next = now + 0.9 * SYNC_INTERVAL_S  # wake-ups may come a little early
        self._resent_drafts = False
        progressed, self._answer.progressed = self._answer.progressed, False
        if begins or progressed or not self._peer.linked:
            return []
        self._decider.forget_requests()
        return [Send(self._sync_state()), *self._decider.request_detail()]

    def receive(self, state: SyncState) -> list[Effect]:
        """Send again what the peer lacks; send the own state where the peer has more."""
        peer, num_targets = self._peer, len(self._answer.targets)
        effects: list[Effect] = []
        if state.turn < peer.turn and not peer.decides:
            effects.append(Send(self._decider.handover_message()))
        if state.targets < num_targets:
            effects.append(Send(self._decider.targets_message(state.targets)))
        if state.turn > peer.turn or state.targets > num_targets:
            effects.append(Send(self._sync_state()))
        if state.waits and not peer.decides and not self._resent_drafts:
            self._resent_drafts = True
            effects += [*self._sender.send_weight(), *self._sender.send_all()]
        return effects

    def _sync_state(self) -> SyncState:
        peer, answer = self._peer, self._answer
        lacks_dist = not self._weights.peer_known or self._tree.head.peer_dist is None
        waits = peer.decides and not answer.ended and lacks_dist
        return SyncState(0, peer.epoch, peer.turn, len(answer.targets), waits)
