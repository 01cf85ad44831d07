"""State that the roles of `aggregate` share: the answer so far, what holds with one peer, and which side should decide.

Everything else a role remembers is its own. Writers:

| state | written by |
|---|---|
| `MixedAnswer` | `append`, called by `Decider`, `Follower` and the machine alone; `Joint` clears `progressed` |
| `PeerState.turn`, `start` | `move`, called by `Decider.hand_over` and `Follower.take_over` |
| `PeerState.num_sent` | `Decider.send_targets`, `Follower` |
| `PeerState.broken` | `MixedAnswer.give_up` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.core.aggregation.aggregators import LAST_LEVEL, Aggregator, OwnDist, PeerDist
from paceline.core.aggregation.weights import dequantize_score, quantize_score
from paceline.core.clock import MovingAverage, Ratio
from paceline.core.sampling.dist import Dist
from paceline.core.side import SIDES, Side, other
from paceline.errors import RemoteProtocolError
from paceline.strategies.aggregate.options import pinned_side, sends_both_ways
from paceline.strategies.aggregate.tree_planner import LEAST_USE, DraftTreePlanner
from paceline.strategies.base import ClosePeer, Effect, MachineConfig
from paceline.strategies.decoding.prefix_tree import MAX_LIVE_NODES, NgramDrafts, PrefixNode, PrefixTree
from paceline.strategies.joint import BROKEN_FORM, JointAnswer
from paceline.wire.codec import decode_head, encode_head
from paceline.wire.messages import Drafts
from paceline.wire.payloads import FOLLOWS, NAMED, RECEIVERS, SENDERS, YOURS, EncodedNodes, pack_nodes, unpack_nodes

# Placement of the aggregator: a rule that decides anew at each rejection, after DRAGON's model of the time per token.
#
# The side that aggregates is `here`, the other `there`. All times are seconds.
#
# The model is that of chains, whose holder keeps its drafts to itself. Where both sides send all they compute, as with
# trees, either knows each target as soon as it has both distributions, whoever decides: both places take equally long,
# and a move would only cost its delay. Such a placement is `fixed`.
#
# The paper compares both places in the long run. But where the last target rejected the other side's draft, that side
# must hear of it in any case, and can decide the next target as soon as it has drafted anew, if the aggregator comes
# with the news; else its draft must first come back. So a move then saves a one-way delay, at any other time it costs
# one.
#
# Not modelled, as in the paper: that a rejection of the holder's own drafts costs its queue even where the other side
# is the bottleneck; bounds on drafting ahead.


FIRST_ACCEPTANCE = 0.75  # of drafts, before any is known: about what two sides with documents on one question reach
LEAST_SHARE = 0.15  # of the slower side's decode time, that a move must save: speeds and delays are not known better


def lasting_seconds(here: float, there: float, round_trip: float, acceptance_there: float) -> float:
    """Expected seconds per token of an aggregator that may follow a rejection to the other side: DRAGON's equation 7
    with the quicker of both ways on from a rejection, the round trip or the move."""
    rejected = min(max(here, there + round_trip), max(here, there) + round_trip / 2.0)
    return acceptance_there * max(here, there) + (1.0 - acceptance_there) * rejected


@dataclass(slots=True)
class DeciderPlacement:
    """The choice of the aggregating side, made by the holder after each burst of targets.

    Both sides see every target and may keep one each; only the holder's decides. `fixed`: never moves from there. Never
    moves while a speed or the round trip is unknown.
    """

    holder: Side
    fixed: Side | None = None
    acceptance: dict[Side, Ratio] = field(
        default_factory=lambda: {side: Ratio(FIRST_ACCEPTANCE, strength=4.0, memory=0.98) for side in SIDES}
    )
    decode: dict[Side, float] = field(default_factory=dict)  # s of a drafting step, where it is known
    round_trip: float | None = None
    _last: Mapping[Side, bool] = field(default_factory=dict)  # what the last target accepted, where it is known

    def __post_init__(self) -> None:
        if self.fixed is not None:
            self.holder = self.fixed

    def observe_target(self, accepted: Mapping[Side, bool]) -> None:
        """Record one target; True for a side whose drafting continued without a round trip."""
        self._last = accepted
        for side, was_accepted in accepted.items():
            self.acceptance[side].add(1.0, was_accepted)

    def choose(self, left: int, *, ready: bool) -> Side:
        """The side that should decide the next target. Changes no state: set `holder` on a move.

        left: targets still to be decided. ready: the holder's next draft is there.
        """
        here, there, trip = self.holder, other(self.holder), self.round_trip
        if self.fixed is not None or trip is None or len(self.decode) < len(SIDES) or self._last.get(there, True):
            return here
        if self.decode[here] >= trip + self.decode[there]:
            return here  # its own drafting hides the round trip
        own = 0.0 if ready else self.decode[here]
        staying = max(own, trip + self.decode[there])
        moving = trip / 2.0 + max(own, self.decode[there])
        before_next = min(1.0 / (1.0 - min(self.acceptance[here].value, 0.99)), left)  # targets until it may come back
        lasting = self._lasting(there) - self._lasting(here)
        return there if staying - moving - lasting * before_next >= LEAST_SHARE * max(self.decode.values()) else here

    def _lasting(self, side: Side) -> float:
        assert self.round_trip is not None
        decode, rate = self.decode, self.acceptance[other(side)].value
        return lasting_seconds(decode[side], decode[other(side)], self.round_trip, rate)


# Exchange of draft trees between the two sides: nodes by id in one direction, with their distributions.
#
# A side that does not decide sends the nodes it has computed, under ids it counts up. A tree hangs on an anchor, the
# node of a decided prefix, and later messages on nodes of earlier ones. Where such a message was lost, what hangs on
# it is ignored until all is sent again: a distribution after a prefix never becomes wrong. A token that the receiver
# knows is not repeated, be it its own choice or one that it was sent. So what a side has sent as its choice after a
# prefix stays (`PrefixNode.sent_choice`). A node that is not likely to be used is withheld until it is, since
# distributions are most of an answer's bytes; one with a choice, if it is less likely than `URGENT_USE`, until a
# message goes anyway. A node reveals which token was drafted, so a node that only an n-gram look-up drafted (not
# `derivable`) is withheld with all below it until the peer has sent that token itself or it is a target: documents,
# and other answers of this side, are private.


MAX_MESSAGE_NODES = 256
# Choices all less likely to be used than this wait for company, as alone each takes twice the bytes. The device
# decides, or did at first: less depends on what it sends. At 0.25 for the cloud answers took 3 to 7 % longer at a round
# trip of 300 ms, for a sixth less bytes. Distributions do not wait: answers took 12 % longer.
URGENT_USE: Mapping[Side, float] = {"cloud": 0.15, "device": 0.4}
# Budget of a side's nodes with choices, bytes a token of the answer. Beyond it and what `CREDIT` tokens may take, only
# nodes that are likelier to be used are sent: twice as likely as `LEAST_CHOICE` where as much again is overdrawn.
CHOICE_BYTES: Mapping[Side, float] = {"cloud": 15.0, "device": 7.5}
LEAST_CHOICE = 0.1  # as `LEAST_USE`, of nodes with choices
CREDIT = 4.0
ENVELOPE = 4  # bytes of a message besides its nodes, about
MAX_DEPTH = 256  # tokens below the head; deeper nodes are ignored
MAX_PEER_IDS = 4096  # remembered at once
MAX_PEER_PROBS = 1 << 21  # probabilities of the peer's that live nodes hold: some 25 MB with their token ids
FEW_PROBS = MAX_PEER_PROBS // (MAX_LIVE_NODES + MAX_MESSAGE_NODES)  # so many for every node need not be counted
KEPT_POSITIONS = 128  # decided positions behind the head whose ids may still be anchors or parents


@dataclass(slots=True, eq=False, repr=False)
class DraftExchange:
    """Both directions of one side, under one epoch.

    derivable: the peer may see that this node's token was drafted after its parent. uses: nodes below this head that
    are worth their bytes, with the probability that they are used; None: all are. announce: of a node, the token that
    this expects after it is sent, and nothing of its distribution. only_choices: the peer does likewise.
    """

    side: Side
    aggregator: Aggregator
    vocab_size: int
    tree: PrefixTree
    derivable: Callable[[PrefixNode], bool] = lambda _: True
    uses: Callable[[PrefixNode], Mapping[PrefixNode, float] | None] | None = None
    announce: Callable[[PrefixNode], int] | None = None
    only_choices: bool = False
    node_bytes: MovingAverage = field(default_factory=MovingAverage)  # size of a node on the link
    _withheld: list[PrefixNode] = field(default_factory=list)  # computed nodes that must not be sent yet, parents first
    _begin: int = field(init=False)  # position since when bytes are counted
    _num_bytes: int = 0  # sent
    _next_id: int = 0
    _sent: dict[int, PrefixNode] = field(default_factory=dict)  # by own ids, earlier ones too: a request may name one
    _peer_ids: dict[int, PrefixNode] = field(default_factory=dict)  # by the peer's ids
    _peer_choices: dict[int, int] = field(default_factory=dict)  # by the peer's ids

    def __post_init__(self) -> None:
        self._begin = self.tree.head.position

    # ---- out --------------------------------------------------------------------------------------------------------
    def encode(self, nodes: Sequence[PrefixNode], epoch: int) -> list[Drafts]:
        """Messages for computed nodes, parents first, and for withheld nodes that have become derivable.

        For every live node, if the head was never sent.
        """
        if self.tree.head.own_id is None:
            return self.encode_all(epoch)  # what hangs below the head follows with it
        return self._messages([*self._withheld, *(node for node in nodes if node.own_id is None)], epoch)

    def encode_all(self, epoch: int) -> list[Drafts]:
        """Messages for every live node, under new ids: for a peer that decides from now on, or has missed some."""
        return self._messages(self.tree.head.subtree(), epoch) if self.tree.head.own_dist is not None else []

    @property
    def withholds(self) -> bool:
        return bool(self._withheld)

    def refine(self, node_id: int, level: int, epoch: int) -> list[Drafts]:
        """A node again, in more detail; nothing if it is no longer alive."""
        node = self._sent.get(node_id)
        if node is None or node.own_dist is None or not node.alive or level > LAST_LEVEL:
            return []
        share = self.aggregator.to_wire(self.side, node.own_dist, node.position, level)
        packed = pack_nodes(EncodedNodes(node.position, level, node_id, (-1,), (0,), None, _scores([node])))
        return [] if share.head is None else [Drafts(0, epoch, packed, [encode_head(share.head, precise=True)])]

    def _messages(self, nodes: Iterable[PrefixNode], epoch: int) -> list[Drafts]:
        head = self.tree.head
        uses = None if self.uses is None else self.uses(head)
        if uses is not None and (least := self._least_use()) > LEAST_USE:
            uses = {node: use for node, use in uses.items() if use >= least}
        live = [node for node in nodes if node.alive and node.own_dist is not None]
        ready: dict[PrefixNode, None] = {}
        for node in live:
            parent = node.parent
            parent_sent = parent is not None and (parent in ready or parent.own_id is not None)
            if node is head or (parent_sent and (uses is None or node in uses) and self.derivable(node)):
                ready[node] = None
        may_wait = self.aggregator.sends_choices and head not in ready
        if uses is not None and may_wait and all(uses[node] < URGENT_USE[self.side] for node in ready):
            ready = {}  # they go with the next message that is needed sooner
        self._withheld = [node for node in live if node not in ready]
        sendable = list(ready)
        return [
            self._message(sendable[at : at + MAX_MESSAGE_NODES], epoch)
            for at in range(0, len(sendable), MAX_MESSAGE_NODES)
        ]

    def _least_use(self) -> float:
        """Probability of being used, below which a node is not worth its bytes now."""
        if not self.aggregator.sends_choices:
            return LEAST_USE
        overdrawn = self._num_bytes / CHOICE_BYTES[self.side] - (self.tree.head.position - self._begin) - CREDIT
        return min(1.0, LEAST_CHOICE * (1.0 + max(0.0, overdrawn) / CREDIT))

    def _message(self, nodes: Sequence[PrefixNode], epoch: int) -> Drafts:
        head, first = self.tree.head, self._next_id
        for node in nodes:
            node.own_id = self._next_id
            self._sent[self._next_id] = node
            self._next_id += 1
        shares = [self._share(node, node.own_dist) for node in nodes if node.own_dist is not None]
        heads = [share.head for share in shares if share.head is not None]
        if not heads:
            for node, share in zip(nodes, shares, strict=True):
                node.sent_choice = share.token
        encoded = EncodedNodes(
            position=head.position if nodes[0] is head else None,
            level=0,
            first=first,
            parents=tuple(-1 if node is head else _own_id(node.parent) for node in nodes),
            tokens=tuple(0 if node is head else _edge(node, first) for node in nodes),
            choices=None if heads else tuple(map(_choice, nodes)),
            scores=None if self.announce is not None else _scores(nodes),
        )
        packed = pack_nodes(encoded)
        dists = [encode_head(dist, precise=False) for dist in heads]
        size = len(packed) + sum(len(dist.ids) + len(dist.probs) for dist in dists)
        self.node_bytes.add(size / len(nodes))
        self._num_bytes += size + ENVELOPE
        return Drafts(0, epoch, packed, dists)

    def _share(self, node: PrefixNode, own: OwnDist) -> PeerDist:
        if self.announce is None:
            return self.aggregator.to_wire(self.side, own, node.position)
        return PeerDist(self.announce(node) if node.sent_choice is None else node.sent_choice, None)

    # ---- in ---------------------------------------------------------------------------------------------------------
    def receive(self, message: Drafts) -> None:
        """Add the peer's nodes that still matter to the tree. A message that cannot be decoded counts as lost."""
        try:
            nodes = unpack_nodes(message.nodes, self.vocab_size)
            dists = [decode_head(payload, self.vocab_size) for payload in message.dists]
        except RemoteProtocolError:
            return
        anchor: PrefixNode | None = None
        if nodes.position is not None:
            anchor = self._peer_ids.get(nodes.first) or self.tree.decided(nodes.position)
        if nodes.choices is None and len(dists) != len(nodes.tokens):
            return
        if len(self._peer_ids) > MAX_PEER_IDS:
            self._peer_ids, self._peer_choices = {}, {}  # no honest peer sends so many between two targets
        has_room = not self.tree.full()
        sender, head = other(self.side), self.tree.head
        room = self._room_for(dists)
        for index, (parent, token) in enumerate(zip(nodes.parents, nodes.tokens, strict=True)):
            node_id = nodes.first + index
            node = anchor if parent < 0 else self._child(parent, token, create=has_room)
            if node is None or node.position > head.position + MAX_DEPTH:
                continue
            self._peer_ids[node_id] = node
            dist = dists[index] if nodes.choices is None else None
            room -= 0 if dist is None else len(dist.ids)
            if room < 0:
                break  # counts as lost; what is nearest to the head came first, and room returns as the head moves
            choice = None if nodes.choices is None else nodes.choices[index]
            if choice == YOURS:
                choice = node.sent_choice
            if choice is not None:
                self._peer_choices[node_id] = choice
            if node.alive:
                if self.only_choices:
                    share = None if choice is None else PeerDist(choice, None)
                else:
                    share = self.aggregator.from_wire(sender, dist, choice, node.position, nodes.level)
                if share is not None:
                    log_h = None if nodes.scores is None else dequantize_score(nodes.scores[index])
                    node.set_peer(replace(share, log_evidence=log_h), node_id)

    def _room_for(self, dists: Sequence[Dist]) -> int:
        """Probabilities that may be held beside those of the live nodes. Not counted where these are few each."""
        if max((len(dist.ids) for dist in dists), default=0) <= FEW_PROBS:
            return MAX_PEER_PROBS
        shares = (node.peer_dist for node in self.tree.head.subtree())
        return MAX_PEER_PROBS - sum(len(each.head.ids) for each in shares if each is not None and each.head is not None)

    def _child(self, parent_id: int, token: int, *, create: bool) -> PrefixNode | None:
        """The child of the peer's node by an edge as it was sent; a new one below a live parent, if `create`."""
        parent = self._peer_ids.get(parent_id)
        if parent is None:
            return None
        edge = {FOLLOWS: self._peer_choices.get(parent_id), YOURS: parent.sent_choice}.get(token, token)
        if edge is None:
            return None
        return parent.child(edge) if parent.alive and create else self.tree.find(parent, edge)

    def forget_dead(self) -> None:
        """Forget ids of dead nodes, and of decided ones that are far behind the head."""
        oldest = self.tree.head.position - KEPT_POSITIONS
        for ids in (self._sent, self._peer_ids):
            for node_id in [i for i, node in ids.items() if not node.alive and (node.dead or node.position < oldest)]:
                del ids[node_id]
                if ids is self._peer_ids:
                    self._peer_choices.pop(node_id, None)


def _scores(nodes: Sequence[PrefixNode]) -> tuple[int, ...] | None:
    """Quantized log h after each node; None where scores do not follow the text, or there are no documents."""
    known = [node.log_evidence for node in nodes if node.log_evidence is not None]
    return tuple(map(quantize_score, known)) if len(known) == len(nodes) else None


def _own_id(node: PrefixNode | None) -> int:
    assert node is not None and node.own_id is not None, "a tree is sent from its head on"
    return node.own_id


def _edge(node: PrefixNode, first: int) -> int:
    """The token of a node as it is sent. first: id of the first node of the message."""
    parent = node.parent
    assert parent is not None
    if node.token == parent.sent_choice and (_own_id(parent) < first or _choice(parent) == YOURS):
        return FOLLOWS
    return YOURS if node.token == parent.peer_choice and node.token != parent.sent_choice else node.token


def _choice(node: PrefixNode) -> int:
    """The choice after a node as it is sent."""
    assert node.sent_choice is not None
    return YOURS if node.sent_choice == node.peer_choice else node.sent_choice


FIRST_HOLDER: Side = "device"
CLEANUP_TARGETS = 8  # targets between two removals of node ids that are no longer needed


@dataclass(slots=True)
class PeerState:
    """State shared with one peer under one epoch. A new one is made when the peer is lost or met anew."""

    side: Side  # this side
    epoch: int
    linked: bool
    num_sent: int  # targets the peer has: received from this side, or decided by itself
    exchange: DraftExchange
    placement: DeciderPlacement
    turn: int = 0  # hand-overs so far
    start: int = 0  # the holder decides from this position on
    broken: bool = False  # the peer has broken a rule and is given up

    @property
    def holder(self) -> Side:
        """The side that decides."""
        return self.placement.holder

    @property
    def decides(self) -> bool:
        """This side does."""
        return self.placement.holder == self.side

    def move(self, turn: int, start: int) -> None:
        """Record that the decision changes sides, from this position on."""
        if (turn - self.turn) % 2:
            self.placement.holder = other(self.holder)
        self.turn, self.start = turn, start


def placement_of(config: MachineConfig, keep_at: Side | None = None) -> DeciderPlacement:
    """The place of the decision with a new peer. keep_at: it stays there from the first target on; for comparisons,
    and equal on both sides. None: it moves, where privacy lets it and the places are not alike."""
    alike = FIRST_HOLDER if sends_both_ways(config) else None
    return DeciderPlacement(keep_at or FIRST_HOLDER, fixed=pinned_side(config) or keep_at or alike)


class MixedAnswer(JointAnswer):
    """The targets so far, and how each can be told to the peer. `append` is called by whichever role has the next
    one."""

    peer: PeerState  # the present one; set by the machine

    def __init__(
        self,
        config: MachineConfig,
        tree: PrefixTree,
        planner: DraftTreePlanner,
        ngrams: NgramDrafts | None,
    ) -> None:
        super().__init__(config, tree, ngrams)
        self.sources = [NAMED] * len(self.targets)  # see `wire.messages.Targets`
        # First drafts, where the distribution behind them was known here, and those of them that became targets: of
        # whichever side followed, and of each.
        self.counts = {f"{what}{of}": 0.0 for of in ("", "_cloud", "_device") for what in ("drafted", "accepted")}
        self.handovers = 0  # by this side
        self._drafts_ahead = config.options.drafting.ahead > 0
        self._planner = planner

    def named_by(self, source: int) -> int | None:
        """The next target as the peer that decides tells it; None where a message on which it relies was lost."""
        head = self._tree.head
        return head.sent_choice if source == RECEIVERS else head.peer_choice

    def give_up(self) -> list[Effect]:
        """Close the session of a peer that has led to a token which the constraint forbids."""
        self.peer.broken = True
        return [ClosePeer(BROKEN_FORM)]

    def append(
        self, token: int, lane: Side | None, dist: Dist | None, branches: frozenset[int] | None = None
    ) -> list[Effect]:
        head, peer = self._tree.head, self.peer
        theirs, ours = token == head.peer_choice, token == head.sent_choice
        self.sources.append(RECEIVERS if theirs else SENDERS if ours else NAMED)
        if peer.linked:
            drafted = self._planner.drafted(head)
            for side, tokens in drafted.items():
                for of in (f"_{side}",) if side == peer.holder else ("", f"_{side}"):
                    self.counts[f"drafted{of}"] += bool(tokens)
                    self.counts[f"accepted{of}"] += tokens[:1] == (token,)
            if self._drafts_ahead:  # else nothing is ever drafted, and both places are alike
                peer.placement.observe_target({side: token in tokens for side, tokens in drafted.items()})
        self._planner.observe_target(head, token)
        effects = super().append(token, lane, dist, branches or (head.decided_by if head.sampled == token else None))
        if len(self.targets) % CLEANUP_TARGETS == 0:
            peer.exchange.forget_dead()
        return effects
