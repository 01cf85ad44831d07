"""Recovery of lost messages: a link loses none, but a link that breaks and heals does.

A side without progress sends its state, and the peer sends again what is missing there. A peer that stays silent or
never leads to a target is given up.
"""

from __future__ import annotations

from paceline.strategies.aggregate.deciding import Decider
from paceline.strategies.aggregate.following import DraftSender
from paceline.strategies.aggregate.side_weights import SideWeights
from paceline.strategies.aggregate.state import Answer, PeerState
from paceline.strategies.base import ClosePeer, Effect, MachineConfig, Send
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixTree
from paceline.wire.messages import SyncState

MAX_SILENT_WAKES = 8  # wake-ups without one message from the peer before it is given up
MAX_IDLE_WAKES = 60  # wake-ups without a target, while this side is ready, before a peer that does send is given up


class Resync:
    """Compares the state of both sides of one `PeerState`, when time passes without progress."""

    def __init__(
        self,
        config: MachineConfig,
        answer: Answer,
        peer: PeerState,
        tree: PrefixTree,
        decoder: BranchDecoder,
        weights: SideWeights,
        decider: Decider,
        sender: DraftSender,
    ) -> None:
        self._config = config
        self._answer = answer
        self._peer = peer
        self._tree = tree
        self._decoder = decoder
        self._weights = weights
        self._decider = decider
        self._sender = sender
        self._silent_wakes = 0
        self._idle_wakes = 0
        self._resent_drafts = False  # since the last wake-up

    def message_received(self) -> None:
        """Note that the peer is alive."""
        self._silent_wakes = 0

    def wake(self) -> list[Effect]:
        """Without a target since the last wake-up: send this side's state, or give the peer up."""
        self._resent_drafts = False
        progressed, self._answer.progressed = self._answer.progressed, False
        if progressed:
            self._idle_wakes = 0
        if progressed or not self._peer.linked:
            return []
        self._silent_wakes += 1
        self._idle_wakes += self._decoder.idle
        if self._config.faces_client and (self._silent_wakes >= MAX_SILENT_WAKES or self._idle_wakes >= MAX_IDLE_WAKES):
            return [ClosePeer()]
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
