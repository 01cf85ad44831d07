"""What the two sides tell each other of their trees: nodes by name in one direction, laws beside them.

A side that does not decide ships the nodes it has computed, under names it counts up. A message hangs on an anchor,
the node of a decided prefix, so it can be read whatever was lost before: what it says of a prefix never becomes wrong.
A node tells which token was expected, so one that only a look-up expected (`backed`) waits with all below it until the
peer has said that token itself or it is a target: documents, and other answers of this side, are none of the peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from paceline.core.aggregation.registry import LAST_LEVEL, Aggregator
from paceline.core.aggregation.weights import dequantize_score, quantize_score
from paceline.core.estimation.running import MovingAverage
from paceline.core.side import Side, other
from paceline.errors import RemoteProtocolError
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.wire.dist_codec import decode_head, encode_head
from paceline.wire.messages import Drafts
from paceline.wire.tree_codec import FOLLOWS, EncodedNodes, pack_nodes, unpack_nodes

MAX_NODES = 256  # in one message
MAX_DEPTH = 256  # below the head; what is further is not taken in
MAX_NAMES = 4096  # the peer's, remembered at once
KEPT = 128  # decided positions whose names are still hung on


class DraftExchange:
    """Both directions of one side, under one epoch."""

    def __init__(
        self,
        side: Side,
        rule: Aggregator,
        vocab_size: int,
        paths: PrefixTree,
        *,
        backed: Callable[[PrefixNode], bool] = lambda _: True,
    ) -> None:
        """backed: may the peer hear that this token was expected after the node's parent?"""
        self._derivable = backed
        self._withheld: list[PrefixNode] = []  # computed nodes that may not be told, parents first
        self._side = side
        self._rule = rule
        self._vocab_size = vocab_size
        self._paths = paths
        self.node_bytes = MovingAverage()  # what a node takes on the link
        self._next = 0  # the next name
        self._sent: dict[int, PrefixNode] = {}
        self._peer_ids: dict[int, PrefixNode] = {}  # by the peer's names
        self._chosen: dict[int, int] = {}  # by own names: the choice that was shipped
        self._choices: dict[int, int] = {}  # by the peer's names: the choice it told

    # ---- out --------------------------------------------------------------------------------------------------------
    def encode(self, nodes: Sequence[PrefixNode], epoch: int) -> list[Drafts]:
        """Messages for computed nodes, parents first, and for those that were held back and need not be any more.

        For all that is alive, if the head was never shipped.
        """
        if self._paths.head.own_id is None:
            return self.encode_all(epoch)  # what hangs below the head follows with it
        return self._messages([*self._withheld, *nodes], epoch)

    def encode_all(self, epoch: int) -> list[Drafts]:
        """All that is alive, afresh: for a side that decides from now on, or has missed something."""
        return self._messages(self._paths.head.subtree(), epoch) if self._paths.head.own_dist is not None else []

    @property
    def withholds(self) -> bool:
        """Is anything held back?"""
        return bool(self._withheld)

    def refine(self, number: int, level: int, epoch: int) -> list[Drafts]:
        """A node again, in more detail; nothing when it is not alive any more."""
        node = self._sent.get(number)
        if node is None or node.own_dist is None or not node.alive or level > LAST_LEVEL:
            return []
        share = self._rule.to_wire(self._side, node.own_dist, node.position, level)
        packed = pack_nodes(EncodedNodes(node.position, number, level, number, (-1,), (0,), None, _scores([node])))
        return [] if share.head is None else [Drafts(0, epoch, packed, [encode_head(share.head, precise=True)])]

    def _messages(self, nodes: Iterable[PrefixNode], epoch: int) -> list[Drafts]:
        ready: dict[PrefixNode, None] = {}
        self._withheld = []
        for node in nodes:
            if not node.alive or node.own_dist is None:
                continue
            above = node.parent
            told = above is not None and (above in ready or above.own_id is not None)
            if node is self._paths.head or (told and self._derivable(node)):
                ready[node] = None
            else:
                self._withheld.append(node)
        named = list(ready)
        return [self._message(named[at : at + MAX_NODES], epoch) for at in range(0, len(named), MAX_NODES)]

    def _message(self, nodes: Sequence[PrefixNode], epoch: int) -> Drafts:
        head, first = self._paths.head, self._next
        for node in nodes:
            node.own_id = self._next
            self._sent[self._next] = node
            self._next += 1
        assert head.own_id is not None, "a tree is shipped from its head on"
        shares = [
            self._rule.to_wire(self._side, node.own_dist, node.position) for node in nodes if node.own_dist is not None
        ]
        heads = [share.head for share in shares if share.head is not None]
        above = [-1 if node is head or node.parent is None else node.parent.own_id for node in nodes]
        parents = tuple(-1 if number is None else number for number in above)
        choices = None if heads else tuple(share.token for share in shares)
        tokens = tuple(self._edge(node, parent, first) for node, parent in zip(nodes, parents, strict=True))
        self._chosen.update({} if choices is None else zip(range(first, self._next), choices, strict=True))
        scores = None if choices is not None else _scores(nodes)
        packed = pack_nodes(EncodedNodes(head.position, head.own_id, 0, first, parents, tokens, choices, scores))
        laws = [encode_head(law, precise=False) for law in heads]
        self.node_bytes.add((len(packed) + sum(len(law.ids) + len(law.probs) for law in laws)) / len(nodes))
        return Drafts(0, epoch, packed, laws)

    def _edge(self, node: PrefixNode, parent: int, first: int) -> int:
        if parent < 0:
            return 0
        return FOLLOWS if parent < first and self._chosen.get(parent) == node.token else node.token

    # ---- in ---------------------------------------------------------------------------------------------------------
    def receive(self, message: Drafts) -> None:
        """Take in what still matters of the peer's nodes. What cannot be read is as good as lost."""
        try:
            nodes = unpack_nodes(message.nodes, self._vocab_size)
            laws = [decode_head(payload, self._vocab_size) for payload in message.dists]
        except RemoteProtocolError:
            return
        anchor = self._peer_ids.get(nodes.anchor) or self._paths.decided(nodes.position)
        if anchor is None or (nodes.choices is None and len(laws) != len(nodes.tokens)):
            return
        if len(self._peer_ids) > MAX_NAMES:
            self._peer_ids, self._choices = {}, {}  # nobody honest says so much between two targets
        room = not self._paths.full()
        self._peer_ids[nodes.anchor] = anchor
        speaker, head = other(self._side), self._paths.head
        for place, (parent, token) in enumerate(zip(nodes.parents, nodes.tokens, strict=True)):
            number = nodes.first + place
            edge = self._choices.get(parent) if token == FOLLOWS else token
            node = anchor if number == nodes.anchor else self._below(self._peer_ids.get(parent), edge, room=room)
            if node is None or node.position > head.position + MAX_DEPTH:
                continue
            self._peer_ids[number] = node
            law = laws[place] if nodes.choices is None else None
            choice = None if nodes.choices is None else nodes.choices[place]
            if choice is not None:
                self._choices[number] = choice
            if node.alive:
                share = self._rule.from_wire(speaker, law, choice, node.position, nodes.level)
                if share is not None:
                    log_h = None if nodes.scores is None else dequantize_score(nodes.scores[place])
                    node.set_peer(replace(share, log_evidence=log_h), number)

    def _below(self, parent: PrefixNode | None, token: int | None, *, room: bool) -> PrefixNode | None:
        """The child of that token, a new one where there is room."""
        if parent is None or token is None:
            return None
        return parent.child(token) if parent.alive and room else self._paths.find(parent, token)

    def forget_dead(self) -> None:
        """Names of what the targets cannot go through any more. The head's parents are still hung on for a while."""
        since = self._paths.head.position - KEPT
        for names, choices in ((self._sent, self._chosen), (self._peer_ids, self._choices)):
            for number in [n for n, node in names.items() if not node.alive and (node.dead or node.position < since)]:
                del names[number]
                choices.pop(number, None)


def _scores(nodes: Sequence[PrefixNode]) -> tuple[int, ...] | None:
    """Of nodes whose laws are shipped, where scores follow the text and there are documents."""
    known = [node.log_evidence for node in nodes if node.log_evidence is not None]
    return tuple(map(quantize_score, known)) if len(known) == len(nodes) else None
