"""The two roles of an answer's side, and how they change: who decides, who follows, and what either sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.aggregation.aggregators import LAST_LEVEL, Aggregator
from paceline.core.aggregation.weights import side_weights
from paceline.core.clock import DecodeSpeed, StepClock
from paceline.core.side import Side, other
from paceline.strategies.aggregate.options import announces, pinned_side, sends_both_ways
from paceline.strategies.aggregate.state import MixedAnswer, PeerState
from paceline.strategies.base import Effect, MachineConfig, Send
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.joint import LANES, EarlyTargets
from paceline.wire.messages import DetailRequest, EvidenceWeight, Handover, SpeedReport, Targets
from paceline.wire.payloads import NAMED

# Weights of both sides after a prefix: eta of DRAGON eq. 4, from the summed weights of their documents (log h).
#
# A side's log h is sent once, or, where scores follow the text, comes with every distribution.


@dataclass(slots=True, eq=False, repr=False)
class SideWeights:
    """Weights as one side knows them. decoder: this side's, for the weight of its documents. writer: the side that
    counts alone where neither reads documents; None: both do."""

    side: Side
    decoder: BranchDecoder
    rescoring: bool
    writer: Side | None
    peer_known: bool = False
    _peer_log_h: float | None = None
    _fixed: Mapping[Side, float] | None = None  # where scores do not follow the text

    def reset_peer(self) -> None:
        self.peer_known, self._peer_log_h, self._fixed = False, None, None

    def receive(self, log_h: float | None) -> None:
        """Set the peer's summed weight at the beginning of the answer; None: it found no document."""
        self._peer_log_h, self.peer_known = log_h, True

    @property
    def has_documents(self) -> bool:
        return self._peer_log_h is not None or self.decoder.log_evidence is not None

    def at(self, node: PrefixNode) -> Mapping[Side, float] | None:
        """eta of both sides after this prefix, summing to 1; None while it is not known."""
        if not (self.peer_known and self.decoder.started):
            return None  # a side's documents are not known before it has searched
        own_log_h = self.decoder.log_evidence
        if not self.rescoring or own_log_h is None or self._peer_log_h is None:  # without documents: weight 0
            if self._fixed is None:
                log_h = {self.side: own_log_h, other(self.side): self._peer_log_h}
                if self.writer is not None and not self.has_documents:
                    log_h[self.writer] = 0.0
                self._fixed = side_weights(log_h)
            return self._fixed
        peer_log_h = None if node.peer_dist is None else node.peer_dist.log_evidence
        if node.log_evidence is None or peer_log_h is None:
            return None
        return side_weights({self.side: node.log_evidence, other(self.side): peer_log_h})


# The side that decides: append targets, send them, request detail where they are not determined, hand over.


@dataclass(slots=True, eq=False, repr=False)
class Decider:
    """Chooses targets, with one peer or alone. Does nothing while the peer decides."""

    config: MachineConfig
    answer: MixedAnswer
    peer: PeerState
    tree: PrefixTree
    aggregator: Aggregator
    weights: SideWeights
    timing: StepClock
    requested: set[tuple[int, int]] = field(default_factory=set)  # node ids and levels
    _undecided: tuple[PrefixNode, bool, int] | None = None  # known when the aggregator last had no answer

    def decide(self) -> list[Effect]:
        """Append the targets that are determined, where they are this side's to decide."""
        effects: list[Effect] = []
        while self.peer.decides and not (self.answer.ended or self.peer.broken):
            decided = self._decide_next()
            if decided is None:
                break
            effects += decided
        return effects

    def _decide_next(self) -> list[Effect] | None:
        """One target from both sides' distributions, once those that count are here."""
        head = self.tree.head
        weights = self.weights.at(head)
        if weights is None or len(self.answer.targets) < self.peer.start:
            return None
        known = head, head.own_dist is not None, -1 if head.peer_dist is None else head.peer_dist.level
        if known == self._undecided:
            return None
        target = self.aggregator.decide(self.config.seat.side, head.own_dist, head.peer_dist, weights, head.position)
        if target is None:
            self._undecided = known
            return None
        if not self.answer.permits(target.token):  # this side's own distribution is masked, the peer's is as it came
            return self.answer.give_up()
        return self.answer.append(target.token, target.lane if self.weights.has_documents else None, target.dist)

    def send_targets(self) -> list[Effect]:
        """Send the targets that the peer has not got yet."""
        peer, start = self.peer, self.peer.num_sent
        if not (peer.decides and peer.linked) or start >= len(self.answer.targets):
            return []
        # Not to a device, which remembers what it was told (`runtime.asking`).
        refers = self.config.seat.faces_client and self.config.seat.side == "device"
        sources = bytes(self.answer.sources[start:]) if refers else b""
        message = self.targets_message(start, sources if any(sources) else b"")
        peer.num_sent = len(self.answer.targets)
        return [Send(message)]

    def targets_message(self, start: int, sources: bytes = b"") -> Targets:
        """All targets from `start` on; with lanes only where the peer faces the client. sources: of those targets,
        where the peer has missed nothing."""
        tokens = self.answer.targets[start:]
        if sources:
            tokens = [token if source == NAMED else 0 for token, source in zip(tokens, sources, strict=True)]
        lanes = b"" if self.config.seat.faces_client else bytes(map(LANES.index, self.answer.lanes[start:]))
        return Targets(0, self.peer.epoch, start, tokens, lanes, sources)

    def request_detail(self) -> list[Effect]:
        """Request more of the peer's distribution, where the part it sent does not determine the next target."""
        peer, head = self.peer, self.tree.head
        weights = self.weights.at(head)  # also fixes them where this side does not decide
        if not (peer.decides and peer.linked) or weights is None or len(self.answer.targets) < peer.start:
            return []
        if head.peer_dist is None or head.peer_id is None:
            return []
        if head.own_dist is None and weights[self.config.seat.side] > 0.0:
            return []
        request = head.peer_id, head.peer_dist.level + 1
        if head.peer_dist.head is None or request[1] > LAST_LEVEL or request in self.requested:
            return []
        self.requested.add(request)
        return [Send(DetailRequest(0, peer.epoch, *request))]

    def hand_over(self, rtt: float | None) -> list[Effect]:
        """Let the peer decide where that is faster. rtt: s; None: not measured yet."""
        peer, side = self.peer, self.config.seat.side
        if not (peer.decides and peer.linked and self.weights.peer_known) or rtt is None:
            return []
        position = len(self.answer.targets)
        peer.placement.decode[side], peer.placement.round_trip = self.timing.at(1), rtt
        ready = self.tree.head.own_dist is not None
        if peer.placement.choose(self.config.output.max_tokens - position, ready=ready) == side:
            return []
        peer.move(peer.turn + 1, len(self.answer.targets))
        self.answer.handovers += 1
        return [Send(self.handover_message())]

    def handover_message(self) -> Handover:
        return Handover(0, self.peer.epoch, self.peer.turn, self.peer.start)


# The side that follows: append the targets it receives, take over the decision, and send its drafts.


SPEED_CHANGE_RATIO = 0.1  # relative change of the own speed that is worth a message


@dataclass(slots=True, eq=False, repr=False)
class Follower:
    """Appends the peer's targets in order, from whichever messages hold them."""

    config: MachineConfig
    answer: MixedAnswer
    peer: PeerState
    _early: EarlyTargets = field(default_factory=EarlyTargets)

    def receive(self, message: Targets) -> list[Effect]:
        """Append the targets that are new; those that come too early wait. Ignores a message that cannot be valid."""
        if (
            self.peer.broken
            or self.answer.ended
            or any(token >= self.config.output.vocab_size for token in message.tokens)
            or message.start + len(message.tokens) > self.config.output.max_tokens
        ):
            return []
        answer = self.answer
        self._early.add(message, len(answer.targets))
        effects: list[Effect] = []
        while not (answer.ended or self.peer.broken):
            if (ready := self._early.pop(len(answer.targets))) is None:
                break
            effects += self._append(ready)
        return effects

    def _append(self, message: Targets) -> list[Effect]:
        answer, peer = self.answer, self.peer
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
                return [*effects, *answer.give_up()]
            effects += answer.append(token, LANES[lane] if lane < len(LANES) else None, None)
            peer.num_sent = max(peer.num_sent, len(answer.targets))
        return effects

    def take_over(self, message: Handover) -> None:
        """Decide from now on. Ignored where that is known already, or not the peer's to choose."""
        peer, may_decide = self.peer, pinned_side(self.config) in (None, self.config.seat.side)
        if not peer.decides and message.turn == peer.turn + 1 and may_decide:
            peer.move(message.turn, message.start)
            peer.num_sent = max(message.start, len(self.answer.targets))


class DraftSender:
    """Sends what this side computes: the weight of its documents, its speed, and nodes with their distributions."""

    def __init__(self, config: MachineConfig, peer: PeerState, decoder: BranchDecoder, timing: StepClock) -> None:
        pinned, both_ways = pinned_side(config), sends_both_ways(config)
        self.may_send = pinned != config.seat.side  # what this side computes may leave it
        self._sends_deciding = both_ways or (pinned is not None and self.may_send and config.options.drafting.rows > 1)
        self.announces = announces(config) and config.seat.side == "device"  # choices, and nothing else of its nodes
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
        speed, reported = self._timing.speed(), self._reported
        if reported is not None and abs(speed.decode_s - reported.decode_s) <= SPEED_CHANGE_RATIO * reported.decode_s:
            return []
        self._reported = speed
        return [Send(SpeedReport(0, self._peer.epoch, speed.decode_s, speed.row_s))]
