"""State that the roles of `aggregate` share: the answer so far, and what holds with one peer.

Everything else a role remembers is its own. Writers:

| state | written by |
|---|---|
| `Answer` | `append`, called by `Decider` and `Follower`; `Resync.wake` clears `progressed` |
| `PeerState.turn`, `start`, `holder`, `decides` | `move`, called by `Decider.hand_over` and `Follower.take_over` |
| `PeerState.num_sent` | `Decider.send_targets`, `Follower` |
| `PeerState.linked` | the machine |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.aggregation.placement import Placement
from paceline.core.sampling.dist import Dist
from paceline.core.side import Side, other
from paceline.strategies.aggregate.exchange import DraftExchange
from paceline.strategies.aggregate.options import pinned_side, sends_both_ways
from paceline.strategies.aggregate.stats import AggregateStats
from paceline.strategies.aggregate.tree_planner import DraftTreePlanner
from paceline.strategies.base import ClosePeer, Effect, Emit, MachineConfig
from paceline.strategies.decoding.form import BROKEN_FORM, permits
from paceline.strategies.decoding.ngram_drafts import NgramDrafts
from paceline.strategies.decoding.prefix_tree import PrefixTree
from paceline.wire.payloads.target_codec import NAMED, RECEIVERS, SENDERS

FIRST_HOLDER: Side = "device"
CLEANUP_TARGETS = 8  # targets between two removals of node ids that are no longer needed
LANES: tuple[Side | None, ...] = (None, "cloud", "device")  # by their number on the wire


@dataclass(slots=True)
class PeerState:
    """State shared with one peer under one epoch. A new one is made when the peer is lost or met anew."""

    side: Side  # this side
    epoch: int
    linked: bool
    num_sent: int  # targets the peer has: received from this side, or decided by itself
    exchange: DraftExchange
    placement: Placement
    turn: int = 0  # hand-overs so far
    start: int = 0  # the holder decides from this position on
    first_holder: Side = field(init=False)
    holder: Side = field(init=False)  # the side that decides
    decides: bool = field(init=False)  # this side does
    broken: bool = False  # the peer has broken a rule and is given up

    def __post_init__(self) -> None:
        self.first_holder = self.holder = self.placement.holder
        self.decides = self.holder == self.side

    def move(self, turn: int, start: int) -> None:
        """Record that the decision changes sides, from this position on."""
        self.turn, self.start = turn, start
        self.holder = self.first_holder if turn % 2 == 0 else other(self.first_holder)
        self.decides = self.holder == self.side
        self.placement.moved(self.holder)


def placement_of(config: MachineConfig, keep_at: Side | None = None) -> Placement:
    """The place of the decision with a new peer. keep_at: it stays there from the first target on; for comparisons,
    and equal on both sides. None: it moves, where privacy lets it and the places are not alike."""
    alike = FIRST_HOLDER if sends_both_ways(config) else None
    return Placement(keep_at or FIRST_HOLDER, fixed=pinned_side(config) or keep_at or alike)


class Answer:
    """The targets so far, on this side. `append` is called by whichever role has the next one."""

    def __init__(
        self,
        config: MachineConfig,
        tree: PrefixTree,
        planner: DraftTreePlanner,
        ngram_drafts: NgramDrafts | None,
        stats: AggregateStats,
    ) -> None:
        self.targets = list(config.targets)
        self.lanes = [0] * len(config.targets)
        self.sources = [NAMED] * len(config.targets)  # how each can be told to the peer (`wire.messages.Targets`)
        self.ended = False  # all targets are known
        self.progressed = False  # since the last wake-up
        self._config = config
        self._drafts_ahead = config.options.drafting.ahead > 0
        self._tree = tree
        self._planner = planner
        self._ngram_drafts = ngram_drafts
        self._stats = stats

    def named_by(self, source: int) -> int | None:
        """The next target as the peer that decides tells it; None where a message on which it relies was lost."""
        head = self._tree.head
        return head.sent_choice if source == RECEIVERS else head.peer_choice

    def permits(self, token: int) -> bool:
        """See `decoding.form.permits`."""
        return permits(self._config, self.targets, token)

    def give_up(self, peer: PeerState) -> list[Effect]:
        """Close the session of a peer that has led to a token which the constraint forbids."""
        peer.broken = True
        return [ClosePeer(BROKEN_FORM)]

    def append(self, token: int, lane: int, dist: Dist | None, peer: PeerState) -> list[Effect]:
        """Add the next target, and emit it if this side faces the client."""
        head = self._tree.head
        theirs, ours = token == head.peer_choice, token == head.sent_choice
        self.sources.append(RECEIVERS if theirs else SENDERS if ours else NAMED)
        if peer.linked:
            self._stats.count_target(token, self._planner.first_drafts(head), peer.holder)
            if self._drafts_ahead:  # else nothing is ever drafted, and both places are alike
                peer.placement.observe_target(self._planner.was_drafted(head, token))
        self._planner.observe_target(head, token)
        if self._ngram_drafts is not None:
            self._ngram_drafts.observe_target(head, token)
        self._tree.advance(token)
        self.targets.append(token)
        self.lanes.append(lane)
        self.progressed = True
        if len(self.targets) % CLEANUP_TARGETS == 0:
            peer.exchange.forget_dead()
        stops = token in self._config.eos_ids
        self.ended = stops or len(self.targets) >= self._config.max_tokens
        branches = head.decided_by if head.sampled == token else None
        return [Emit(token, dist, LANES[lane], branches)] if self._config.faces_client and not stops else []
