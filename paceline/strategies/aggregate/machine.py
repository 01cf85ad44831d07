"""`aggregate`: distributed RAG with speculative aggregation (DRAGON).

Each side continues its own documents and drafts ahead of the targets, as a tree. One side at a time decides: it has
both sides' distributions and makes each target of them with an aggregator (`core.aggregation.aggregators`); the other
follows and sends what it computes. The decision moves by measured speeds (`DeciderPlacement`), where privacy
lets it.

A target is a function of the seed, the prefix, both distributions and their weights: never of drafts, trees, timing,
message order or the side that decides. At the level `document-private` a device may follow only under `coin` without
rescoring, and sends one choice a position with its documents' summed weight and its speed. Else it decides: for its own
client it sends targets and the one path of tokens that it expects, for the cloud's targets with the side whose
documents each came from.

Where scores follow the text (`Options.rescoring`), they are kept per prefix as distributions are, so that nothing is
rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.aggregation.aggregators import Aggregator, make_aggregator
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import filter_top
from paceline.core.side import Side, other
from paceline.strategies.aggregate.options import (
    accepts,
    aggregator_of,
    announces,
    check,
    choose,
    options_of,
)
from paceline.strategies.aggregate.roles import Decider, DraftSender, Follower, SideWeights
from paceline.strategies.aggregate.state import DraftExchange, MixedAnswer, PeerState, placement_of
from paceline.strategies.aggregate.tree_planner import DraftTreePlanner
from paceline.strategies.base import JOINT_LEVELS, Effect, MachineConfig, Sampled, Scored, Send, Strategy
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import NgramDrafts, PrefixNode, PrefixTree
from paceline.strategies.joint import Joint
from paceline.wire.messages import (
    STRATEGY_MESSAGES,
    AggregateOptions,
    DetailRequest,
    Drafts,
    EvidenceWeight,
    Handover,
    SessionMessage,
    SpeedReport,
    SyncState,
    Targets,
)


class Aggregate(Joint):
    """One side. It decides, follows (the other with a peer), or is alone.

    Dispatches events to the roles and asks for the next forward. The roles live as long as their `PeerState`: when the
    peer is lost or met anew, new ones are made.
    """

    def __init__(
        self, config: MachineConfig, *, keep_at: Side | None = None, aggregator: Aggregator | None = None
    ) -> None:
        """keep_at: see `placement_of`. aggregator: in place of the one that the options name, for comparisons."""
        self._keep_at = keep_at
        options, output = options_of(config), config.output
        self._aggregator = aggregator or make_aggregator(
            aggregator_of(config), output.sampling, needs_dists=options.needs_dists, vocab_size=output.vocab_size
        )
        tree = PrefixTree(len(config.seat.targets))
        online_stats = config.means.stats or OnlineStats()
        ngrams = NgramDrafts.of(config, online_stats)
        heads = not (output.needs_dists or options.needs_dists) and self._aggregator.reads_heads
        decoder = BranchDecoder(
            output, rescoring=options.rescoring, keep_heads=ngrams is not None, samples=heads, heads=heads
        )
        self._weights = SideWeights(config.seat.side, decoder, rescoring=options.rescoring, writer=options.writer)
        self._planner = DraftTreePlanner(
            config, self._aggregator, online_stats, weigh=self._weights.at, ngram_drafts=ngrams
        )
        self._mixed = MixedAnswer(config, tree, self._planner, ngrams)
        super().__init__(config, tree, decoder, self._mixed, online_stats.timing, ngrams)
        self._meet_peer()

    def _meet_peer(self) -> None:
        """Begin every role afresh."""
        config, answer, tree = self._config, self._mixed, self._tree
        tree.forget_peer_ids()
        self._weights.reset_peer()
        planner, shows_choices = self._planner, announces(config)
        shows = shows_choices and config.seat.side == "device"
        exchange = DraftExchange(
            config.seat.side,
            self._aggregator,
            config.output.vocab_size,
            tree,
            derivable=planner.may_be_announced if shows else planner.derivable_by_peer,
            uses=None if shows else planner.uses,
            announce=planner.expected if shows else None,
            only_choices=shows_choices and config.seat.side == "cloud",
        )
        placement = placement_of(config, self._keep_at)
        peer = PeerState(config.seat.side, self._epoch, self._linked, len(answer.targets), exchange, placement)
        self._peer = answer.peer = peer
        self._decider = Decider(config, answer, peer, tree, self._aggregator, self._weights, self._timing)
        self._follower = Follower(config, answer, peer)
        self._sender = DraftSender(config, peer, self._decoder, self._timing)
        self._resent = False  # what this side has computed, since the state was looked at last

    # ---- events -----------------------------------------------------------------------------------------------------
    def _brings_on(self, message: SessionMessage) -> bool:
        return not isinstance(message, SyncState | SpeedReport)

    def _greet(self, *, again: bool) -> list[Effect]:
        drafts = self._sender.send_all() if again and self._sender.sends else []
        return [*self._sender.send_weight(), *drafts]

    def _synchronise(self, *, progressed: bool) -> list[Effect]:
        """Without progress: send this side's state, and the peer sends again what is missing here."""
        self._resent = False
        if progressed or not self._linked:
            return []
        self._decider.requested.clear()  # they, or what answers them, may be lost
        return [self._sync_state(), *self._decider.request_detail()]

    def _sync_state(self) -> Send:
        peer, answer = self._peer, self._answer
        lacks_dist = not self._weights.peer_known or self._tree.head.peer_dist is None
        waits = peer.decides and not answer.ended and lacks_dist
        return Send(SyncState(0, peer.epoch, peer.turn, len(answer.targets), waits))

    def _compare(self, state: SyncState) -> list[Effect]:
        """Send again what the peer lacks; send the own state where the peer has more."""
        peer, num_targets = self._peer, len(self._answer.targets)
        effects: list[Effect] = []
        if state.turn < peer.turn and not peer.decides:
            effects.append(Send(self._decider.handover_message()))
        if state.targets < num_targets:
            effects.append(Send(self._decider.targets_message(state.targets)))
        if state.turn > peer.turn or state.targets > num_targets:
            effects.append(self._sync_state())
        if state.waits and not peer.decides and not self._resent:
            self._resent = True
            effects += [*self._sender.send_weight(), *self._sender.send_all()]
        return effects

    def _computed(self, event: Scored | Sampled, nodes: Sequence[PrefixNode]) -> list[Effect]:  # noqa: ARG002
        if not nodes:
            return []  # other branches are still under way
        if self._sender.announces:  # not what these rows have decided
            effects = self._advance()
            return effects if self._finished else [*effects, *self._sender.send(nodes)]
        return [*self._sender.send(nodes), *self._advance()]

    def _received(self, message: SessionMessage) -> list[Effect]:
        effects: list[Effect] = []
        match message:
            case Drafts():
                self._peer.exchange.receive(message)
            case EvidenceWeight(log_weight=log_weight):
                self._weights.receive(log_weight)
            case Targets():
                effects = self._follower.receive(message)
            case DetailRequest(node=node, level=level):
                if self._sender.may_send:
                    return self._sender.refine(node, level)
            case Handover():
                self._follower.take_over(message)
            case SpeedReport(decode_s=decode_s):
                self._peer.placement.decode[other(self._config.seat.side)] = decode_s
            case SyncState():
                effects = self._compare(message)
        return [*effects, *self._advance()]

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Effect]:
        """Do everything that has become possible: targets, messages, the next forward."""
        config, answer = self._config, self._answer
        if self._ngrams is not None and len(answer.targets) > len(config.seat.targets):
            self._ngrams.read()  # not sooner: the first token would wait for it
        effects = self._decider.decide() if self._linked else self._decide_alone()
        effects += self._decider.send_targets()
        if answer.ended:
            return [*effects, *self._end()]
        if not (config.seat.faces_client or self._decoder.fits(len(answer.targets))):
            return [*effects, self._finish("length")]  # its context has ended, the answer has not
        effects += self._decider.request_detail()
        if handover := self._decider.hand_over(self._rtt):
            effects += [*handover, *self._sender.send_all()]
        return [*effects, *self._sender.send_released(), *self._compute()]

    def _compute(self) -> list[Effect]:
        """The next forward: rows of targets that are missing, and as many drafts as pay for themselves."""
        decoder, head = self._decoder, self._tree.head
        if not decoder.idle:
            return []
        effects = decoder.commit_to(head)
        limit = self._config.output.max_tokens
        if decoder.max_new_tokens is not None:
            limit = min(limit, decoder.max_new_tokens + 1)
        delay = self._rtt or 0.0 if self._sender.sends else 0.0
        picked = self._planner.select(head, self._forward_seconds, delay, limit, alone=not self._linked)
        missing = decoder.missing_rows(head)
        if nodes := [*missing, *[node for node in picked if node is not head][: decoder.spare_rows(missing)]]:
            return [*effects, *decoder.append_rows(nodes, head, self._now)]
        return [*effects, *self._sender.flush()]

    def _forward_seconds(self, rows: int) -> float:
        """Cost of a forward of so many rows: its time, and that of its distributions on a link that is full."""
        node_bytes = self._peer.exchange.node_bytes.value
        transfer = 0.0
        if self._bandwidth is not None and node_bytes is not None and self._sender.sends:
            transfer = rows * node_bytes / self._bandwidth
        return self._timing.at(rows) + transfer

    def _alone_dist(self, node: PrefixNode) -> Dist | None:
        own = node.own_dist
        return None if own is None or own.head is not None else filter_top(own.whole, self._config.output.sampling)

    def stats(self) -> dict[str, float]:
        decoder, handovers = self._decoder, self._mixed.handovers
        computed = {"handovers": handovers, "forwards": decoder.forwards, "rows": decoder.rows, "alone": self._alone}
        return self._mixed.counts | {name: float(count) for name, count in computed.items()}


aggregate = Strategy(
    name="aggregate",
    machine=Aggregate,
    text_of="both",
    needs_peer=True,
    options=AggregateOptions,
    messages=STRATEGY_MESSAGES,
    privacy_levels=JOINT_LEVELS,
    check=check,
    choose=choose,
    accepts=accepts,
)
