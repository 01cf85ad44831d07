"""The side that follows: append the targets it receives, take over the decision, and send its drafts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.estimation import DecodeSpeed, TimingModel
from paceline.strategies.aggregate.options import announces, pinned_side, sends_both_ways
from paceline.strategies.aggregate.state import LANES, Answer, PeerState
from paceline.strategies.base import Effect, MachineConfig, Send
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode
from paceline.wire.messages import EvidenceWeight, Handover, SpeedReport, Targets
from paceline.wire.payloads.target_codec import NAMED

MAX_EARLY_MESSAGES = 64  # messages of targets that wait for earlier ones; the rest is asked for again
MAX_EARLY_TOKENS = 64  # in each of them
SPEED_CHANGE_RATIO = 0.1  # relative change of the own speed that is worth a message


class Follower:
    """Appends the peer's targets in order, from whichever messages hold them."""

    def __init__(self, config: MachineConfig, answer: Answer, peer: PeerState) -> None:
        self._config = config
        self._answer = answer
        self._peer = peer
        self._may_decide = pinned_side(config) in (None, config.side)
        self._early: dict[int, Targets] = {}  # by their start: messages that came before the targets they follow

    def receive(self, message: Targets) -> list[Effect] | None:
        """Append the targets that are new; those that come too early wait. None for a message that cannot be valid."""
        if (
            self._peer.broken
            or any(token >= self._config.vocab_size for token in message.tokens)
            or message.start + len(message.tokens) > self._config.max_tokens
        ):
            return None
        targets = self._answer.targets
        too_many = len(self._early) >= MAX_EARLY_MESSAGES or len(message.tokens) > MAX_EARLY_TOKENS
        if message.start <= len(targets) or not too_many:
            kept = self._early.get(message.start)
            if kept is None or len(kept.tokens) <= len(message.tokens):
                self._early[message.start] = message
        effects: list[Effect] = []
        while not (self._answer.ended or self._peer.broken):
            if (ready := min(self._early, default=len(targets) + 1)) > len(targets):
                break
            effects += self._append(self._early.pop(ready))
        return effects

    def _append(self, message: Targets) -> list[Effect]:
        answer, peer = self._answer, self._peer
        effects: list[Effect] = []
        lanes = message.lanes or bytes(len(message.tokens))
        fresh = slice(len(answer.targets) - message.start, None)
        sources = message.sources or bytes(len(message.tokens))
        for named, lane, source in zip(message.tokens[fresh], lanes[fresh], sources[fresh], strict=True):
            if answer.ended or (peer.decides and len(answer.targets) >= peer.start):
                break  # from there on only this side decides
            token = named if source == NAMED else answer.named_by(source)
            if token is None:
                break  # it will be told again
            if not answer.permits(token):
                return [*effects, *answer.give_up(peer)]
            effects += answer.append(token, lane if lane < len(LANES) else 0, None, peer)
            peer.num_sent = max(peer.num_sent, len(answer.targets))
        return effects

    def take_over(self, message: Handover) -> None:
        """Decide from now on. Ignored where that is known already, or not the peer's to choose."""
        peer = self._peer
        if not peer.decides and message.turn == peer.turn + 1 and self._may_decide:
            peer.move(message.turn, message.start)
            peer.num_sent = max(message.start, len(self._answer.targets))


class DraftSender:
    """Sends what this side computes: the weight of its documents, its speed, and nodes with their distributions."""

    def __init__(self, config: MachineConfig, peer: PeerState, decoder: BranchDecoder, timing: TimingModel) -> None:
        pinned, both_ways = pinned_side(config), sends_both_ways(config)
        self.may_send = pinned != config.side  # what this side computes may leave it
        self._sends_deciding = both_ways or (pinned is not None and self.may_send and config.options.drafting.rows > 1)
        self.announces = announces(config) and config.side == "device"  # choices, and nothing else of its nodes
        self._reports_speed = pinned is None and not both_ways  # else the decision does not move
        self._whole_sequences = config.options.drafting.whole_sequences
        self._peer = peer
        self._decoder = decoder
        self._timing = timing
        self._burst: list[PrefixNode] = []  # computed, and waiting for the rest of their sequence
        self._reported: DecodeSpeed | None = None

    @property
    def sends(self) -> bool:
        """Nodes are sent as they are computed.

        A side that decides need not send them; but with trees the peer verifies several of its drafts in one forward.
        """
        return self.announces or (self._sends_deciding if self._peer.decides else self.may_send)

    def send_weight(self) -> list[Effect]:
        """Send the summed weight of this side's documents, once they are known."""
        if not (self._peer.linked and self._decoder.started and self.may_send):
            return []
        return [Send(EvidenceWeight(0, self._peer.epoch, self._decoder.log_evidence))]

    def send(self, nodes: Sequence[PrefixNode]) -> list[Effect]:
        """Send nodes that were scored, or keep them until `flush` where whole sequences are sent."""
        if not self._peer.linked:
            return []
        if self._whole_sequences:
            self._burst += nodes
            return []
        return self._send(nodes)

    def flush(self) -> list[Effect]:
        """Send the sequence that is complete."""
        burst, self._burst = self._burst, []
        return self._send(burst)

    def send_released(self) -> list[Effect]:
        """Send nodes that were withheld until a target or the peer's drafts led to them."""
        exchange = self._peer.exchange
        if not (exchange.withholds and self._peer.linked and self.sends):
            return []
        messages = exchange.encode((), self._peer.epoch)
        self._burst = [node for node in self._burst if node.own_id is None]
        return [Send(message) for message in messages]

    def send_all(self) -> list[Effect]:
        """Send every live node, for a peer that decides from now on or has missed some."""
        if not self.may_send:
            return []
        self._burst = []
        messages = self._peer.exchange.encode_all(self._peer.epoch)
        return [*self._report_speed(), *(Send(message) for message in messages)]

    def refine(self, node_id: int, level: int) -> list[Effect]:
        """Answer a request for more detail."""
        return [Send(message) for message in self._peer.exchange.refine(node_id, level, self._peer.epoch)]

    def _send(self, nodes: Sequence[PrefixNode]) -> list[Effect]:
        if not nodes or not self._peer.linked or not self.sends:
            return []
        messages = self._peer.exchange.encode(nodes, self._peer.epoch)
        return [*self._report_speed(), *(Send(message) for message in messages)]

    def _report_speed(self) -> list[Effect]:
        """Send this side's speed once it is known, and again when it has changed."""
        if not self._reports_speed or self._decoder.timed is None:
            return []
        speed, reported = self._timing.forward.speed(), self._reported
        if reported is not None and abs(speed.decode_s - reported.decode_s) <= SPEED_CHANGE_RATIO * reported.decode_s:
            return []
        self._reported = speed
        return [Send(SpeedReport(0, self._peer.epoch, speed.decode_s, speed.row_s))]
