"""The side that decides: append targets, send them, request detail where they are not determined, hand over."""

from __future__ import annotations

from paceline.core.aggregation.aggregators import LAST_LEVEL, Aggregator
from paceline.core.estimation import TimingModel
from paceline.core.sampling.sampler import filter_top
from paceline.strategies.aggregate.side_weights import SideWeights
from paceline.strategies.aggregate.state import LANES, Answer, PeerState
from paceline.strategies.aggregate.stats import AggregateStats
from paceline.strategies.base import Effect, MachineConfig, Send
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.wire.messages import DetailRequest, Handover, Targets
from paceline.wire.payloads.target_codec import NAMED


class Decider:
    """Chooses targets, with one peer or alone. Does nothing while the peer decides."""

    def __init__(
        self,
        config: MachineConfig,
        answer: Answer,
        peer: PeerState,
        tree: PrefixTree,
        aggregator: Aggregator,
        weights: SideWeights,
        timing: TimingModel,
        stats: AggregateStats,
    ) -> None:
        self._config = config
        self._answer = answer
        self._peer = peer
        self._tree = tree
        self._aggregator = aggregator
        self._weights = weights
        self._timing = timing
        self._stats = stats
        self._requested: set[tuple[int, int]] = set()  # node ids and levels
        self._undecided: tuple[PrefixNode, bool, int] | None = None  # known when the aggregator last had no answer

    def decide(self) -> list[Effect] | None:
        """Append the next target; None where it is not determined, or not for this side to decide."""
        if self._peer.linked:
            return self._decide_together() if self._peer.decides and not self._peer.broken else None
        return None if self._config.waits_for_peer else self._decide_alone()

    def _decide_alone(self) -> list[Effect] | None:
        own, position = self._tree.head.own_dist, len(self._answer.targets)
        if own is None:
            return None
        self._stats.alone += 1
        lane = LANES.index(self._config.side) if self._weights.has_own_documents else 0
        final = None if own.head is not None else filter_top(own.whole, self._config.sampling)
        return self._answer.append(own.token(self._config.sampling, position), lane, final, self._peer)

    def _decide_together(self) -> list[Effect] | None:
        """One target from both sides' distributions, once those that count are here."""
        head = self._tree.head
        weights = self._weights.at(head)
        if weights is None or len(self._answer.targets) < self._peer.start:
            return None
        known = head, head.own_dist is not None, -1 if head.peer_dist is None else head.peer_dist.level
        if known == self._undecided:
            return None
        target = self._aggregator.decide(self._config.side, head.own_dist, head.peer_dist, weights, head.position)
        if target is None:
            self._undecided = known
            return None
        if not self._answer.permits(target.token):  # this side's own distribution is masked, the peer's is as it came
            return self._answer.give_up(self._peer)
        lane = LANES.index(target.lane) if self._weights.has_documents else 0
        return self._answer.append(target.token, lane, target.dist, self._peer)

    def send_targets(self) -> list[Effect]:
        """Send the targets that the peer has not got yet."""
        peer, start = self._peer, self._peer.num_sent
        if not (peer.decides and peer.linked) or start >= len(self._answer.targets):
            return []
        # Not to a device, which remembers what it was told (`runtime.asking`).
        refers = self._config.faces_client and self._config.side == "device"
        sources = bytes(self._answer.sources[start:]) if refers else b""
        message = self.targets_message(start, sources if any(sources) else b"")
        peer.num_sent = len(self._answer.targets)
        return [Send(message)]

    def targets_message(self, start: int, sources: bytes = b"") -> Targets:
        """All targets from `start` on; with lanes only where the peer faces the client. sources: of those targets,
        where the peer has missed nothing."""
        tokens = self._answer.targets[start:]
        if sources:
            tokens = [token if source == NAMED else 0 for token, source in zip(tokens, sources, strict=True)]
        lanes = b"" if self._config.faces_client else bytes(self._answer.lanes[start:])
        return Targets(0, self._peer.epoch, start, tokens, lanes, sources)

    def request_detail(self) -> list[Effect]:
        """Request more of the peer's distribution, where the part it sent does not determine the next target."""
        peer, head = self._peer, self._tree.head
        weights = self._weights.at(head)  # also fixes them where this side does not decide
        if not (peer.decides and peer.linked) or weights is None or len(self._answer.targets) < peer.start:
            return []
        if head.peer_dist is None or head.peer_id is None:
            return []
        if head.own_dist is None and weights[self._config.side] > 0.0:
            return []
        request = head.peer_id, head.peer_dist.level + 1
        if head.peer_dist.head is None or request[1] > LAST_LEVEL or request in self._requested:
            return []
        self._requested.add(request)
        return [Send(DetailRequest(0, peer.epoch, *request))]

    def forget_requests(self) -> None:
        """Allow every request once more: it or its answer may have been lost."""
        self._requested.clear()

    def hand_over(self, rtt: float | None) -> list[Effect]:
        """Let the peer decide where that is faster. rtt: s; None: not measured yet."""
        peer, side = self._peer, self._config.side
        if not (peer.decides and peer.linked and self._weights.peer_known) or rtt is None:
            return []
        position = len(self._answer.targets)
        peer.placement.observe_speed(side, self._timing.speed(position))
        peer.placement.observe_round_trip(rtt)
        ready = self._tree.head.own_dist is not None
        if peer.placement.choose(self._config.max_tokens - position, ready=ready) == side:
            return []
        peer.move(peer.turn + 1, len(self._answer.targets))
        self._stats.handovers += 1
        return [Send(self.handover_message())]

    def handover_message(self) -> Handover:
        return Handover(0, self._peer.epoch, self._peer.turn, self._peer.start)
