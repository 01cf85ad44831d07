"""Draft trees through the real wire: messages may be lost; what arrives is right or ignored."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.aggregation.aggregators import Aggregator, AggregatorName, OwnDist, make_aggregator
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side, other
from paceline.strategies.aggregate.state import CHOICE_BYTES, CREDIT, LEAST_CHOICE, MAX_PEER_PROBS, DraftExchange
from paceline.strategies.decoding.prefix_tree import MAX_LIVE_NODES, PrefixNode, PrefixTree
from paceline.wire.codec import decode, decode_head, encode, encode_head
from paceline.wire.messages import Drafts
from paceline.wire.payloads import FOLLOWS, YOURS, EncodedNodes, pack_nodes, unpack_nodes
from tests.strategies.cases import VOCAB, path

untimed = settings(deadline=None, max_examples=20)
TOKENS = (65, 66, 67, 68)
RULES: list[AggregatorName] = ["mixture", "coin", "paper"]


def random_dist(chance: random.Random) -> Dist:
    probs = np.full(VOCAB, 1e-4)
    for token in TOKENS:
        probs[token] = chance.random() ** 2
    return Dist.dense(probs / probs.sum())


def rule_of(name: AggregatorName) -> Aggregator:
    return make_aggregator(name, SamplingParams(temperature=1.0, seed=3), vocab_size=VOCAB)


def same(one: Dist, other: Dist) -> bool:
    return bool(np.array_equal(one.ids, other.ids) and np.array_equal(one.probs, other.probs))


class Pair:
    """A sending side (the cloud), a receiving side (the device), and the link between them."""

    def __init__(self, name: AggregatorName, chance: random.Random) -> None:
        self.rule, self.chance = rule_of(name), chance
        self.out, self.into = PrefixTree(0), PrefixTree(0)
        self.sender = DraftExchange("cloud", self.rule, VOCAB, self.out)
        self.receiver = DraftExchange("device", self.rule, VOCAB, self.into)
        self.targets: list[int] = []
        self.known = 0  # targets that the sending side knows
        self.dists: dict[tuple[int, ...], Dist] = {}
        self.way: list[bytes] = []

    def grow(self) -> None:
        """Compute some nodes and send them."""
        head = self.out.head
        computed = [node for node in head.subtree() if node.own_dist is not None]
        nodes: list[PrefixNode] = []
        if not computed:
            nodes.append(self.scored(head))
        for _ in range(self.chance.randrange(5)):
            # Often what the parent itself would choose, so that edges need no token.
            parent = self.chance.choice([*computed, *nodes])
            assert parent.own_dist is not None
            choice = self.rule.to_wire("cloud", parent.own_dist, parent.position).token
            node = parent.child(choice if self.chance.random() < 0.6 else self.chance.choice(TOKENS))
            if node.own_dist is None:
                nodes.append(self.scored(node))
        self.send(self.sender.encode(nodes, 0))

    def scored(self, node: PrefixNode) -> PrefixNode:
        node.own_dist = OwnDist.of(self.dists.setdefault(path(node), random_dist(self.chance)))
        return node

    def send(self, messages: list[Drafts]) -> None:
        self.way += [encode(message) for message in messages]

    def arrive(self, at: int) -> None:
        message = decode(self.way.pop(at), vocab_size=VOCAB)
        assert isinstance(message, Drafts)
        self.receiver.receive(message)

    def decide(self) -> None:
        """The receiving side decides a target, mostly one of the drafts it received."""
        drafts = list(self.into.head.children)
        self.targets.append(
            self.chance.choice(drafts) if drafts and self.chance.random() < 0.7 else self.chance.choice(TOKENS)
        )
        self.into.advance(self.targets[-1])

    def learn(self) -> None:
        """The sending side receives the next target, if any."""
        if self.known < len(self.targets):
            self.out.advance(self.targets[self.known])
            self.known += 1

    def check(self) -> int:
        """Every distribution received is the one computed at that node. Returns their number."""
        count = 0
        for node in self.into.head.subtree():
            if node.peer_dist is not None:
                truth = self.dists[path(node)]
                expected = self.rule.to_wire("cloud", OwnDist.of(truth), node.position, node.peer_dist.level)
                assert node.peer_dist.token == expected.token
                if expected.head is None:
                    assert node.peer_dist.head is None
                else:
                    carried = decode_head(encode_head(expected.head, precise=node.peer_dist.level > 0), VOCAB)
                    assert node.peer_dist.head is not None and same(node.peer_dist.head, carried)
                count += 1
        return count


@pytest.mark.parametrize("name", RULES)
@untimed
@given(chance=st.randoms(use_true_random=False))
def test_what_arrives_is_right_in_any_order_of_loss(name: AggregatorName, chance: random.Random) -> None:
    pair = Pair(name, chance)
    for _ in range(30):
        match chance.randrange(6):
            case 0 | 1:
                pair.grow()
            case 2 if pair.way:
                pair.arrive(chance.randrange(len(pair.way)))  # out of order
            case 3 if pair.way:
                at = chance.randrange(len(pair.way))
                if chance.random() < 0.5:
                    pair.way.append(pair.way[at])  # twice
                else:
                    del pair.way[at]  # lost
            case 4:
                pair.decide()
            case _:
                pair.learn()
        pair.check()


@pytest.mark.parametrize("name", RULES)
def test_on_a_link_that_loses_nothing_all_arrives(name: AggregatorName) -> None:
    total = 0
    for seed in range(4):
        pair = Pair(name, random.Random(seed))
        for _ in range(25):
            pair.grow()
            while pair.way:
                pair.arrive(0)
            known = sum(node.own_dist is not None for node in pair.out.head.subtree())
            assert pair.check() == known
            total += known
            if pair.chance.random() < 0.6:
                pair.decide()
                pair.learn()
    assert total > 300


@pytest.mark.parametrize("name", RULES)
def test_what_was_lost_comes_with_all_that_is_alive(name: AggregatorName) -> None:
    for seed in range(6):
        pair = Pair(name, random.Random(seed))
        for _ in range(4):
            pair.grow()
        pair.way.clear()
        if seed % 2:
            pair.decide()
            pair.learn()
            pair.grow()
            pair.way.clear()
        pair.send(pair.sender.encode_all(0))
        while pair.way:
            pair.arrive(0)
        assert pair.check() == sum(node.own_dist is not None for node in pair.out.head.subtree())


class BothWays:
    """Two sides that send each other choices, under `coin`, over a link that keeps the order and may lose messages."""

    def __init__(self, chance: random.Random) -> None:
        self.rule, self.chance = rule_of("coin"), chance
        self.trees = {side: PrefixTree(0) for side in SIDES}
        self.exchanges = {side: DraftExchange(side, self.rule, VOCAB, self.trees[side]) for side in SIDES}
        self.choices: dict[Side, dict[tuple[int, ...], int]] = {side: {} for side in SIDES}
        self.way: dict[Side, list[bytes]] = {side: [] for side in SIDES}  # to each side
        self.referred = 0

    def grow(self, side: Side) -> None:
        """Compute the head, or nodes below computed ones, often by a choice of either side; and send them."""
        computed = [node for node in self.trees[side].head.subtree() if node.own_dist is not None]
        nodes = [] if computed else [self.scored(side, self.trees[side].head)]
        for _ in range(self.chance.randrange(4)):
            parent = self.chance.choice([*computed, *nodes])
            known = [each for each in (parent.sent_choice, parent.peer_choice) if each is not None]
            node = parent.child(self.chance.choice([*known, self.chance.choice(TOKENS)]))
            nodes += [self.scored(side, node)] if node.own_dist is None else []
        for message in self.exchanges[side].encode(nodes, 0):
            sent = unpack_nodes(message.nodes)
            self.referred += (*sent.tokens, *(sent.choices or ())).count(YOURS)
            self.way[other(side)].append(encode(message))

    def scored(self, side: Side, node: PrefixNode) -> PrefixNode:
        node.own_dist = OwnDist.of(random_dist(self.chance))
        self.choices[side][path(node)] = self.rule.to_wire(side, node.own_dist, node.position).token
        return node

    def arrive(self, side: Side) -> None:
        message = decode(self.way[side].pop(0), vocab_size=VOCAB)
        assert isinstance(message, Drafts)
        self.exchanges[side].receive(message)
        for node in self.trees[side].head.subtree():
            if node.peer_dist is not None:
                assert node.peer_dist.token == self.choices[other(side)][path(node)]

    def decide(self) -> None:
        token = self.chance.choice(TOKENS)
        for tree in self.trees.values():
            tree.advance(token)


@untimed
@given(chance=st.randoms(use_true_random=False))
def test_what_is_named_as_the_receivers_choice_is_right_whatever_is_lost(chance: random.Random) -> None:
    both = BothWays(chance)
    for _ in range(60):
        side = chance.choice(SIDES)
        match chance.randrange(8):
            case 0:
                both.decide()
            case 1 if both.way[side]:
                both.way[side].pop(chance.randrange(len(both.way[side])))
            case 2 | 3 | 4 if both.way[side]:
                both.arrive(side)
            case _:
                both.grow(side)


def test_tokens_that_the_receiver_has_chosen_are_named_so() -> None:
    both = BothWays(random.Random(4))
    for _ in range(200):
        for side in SIDES:
            both.grow(side)
            while both.way[side]:
                both.arrive(side)
        if both.chance.random() < 0.3:
            both.decide()
    assert both.referred > 40


def test_a_distribution_takes_few_bytes_and_a_choice_fewer() -> None:
    sizes = {}
    for name in RULES[:2]:
        pair = Pair(name, random.Random(1))
        for _ in range(8):
            pair.grow()
        nodes = sum(node.own_dist is not None for node in pair.out.head.subtree())
        sizes[name] = sum(map(len, pair.way)) / nodes
    assert sizes["coin"] < 16 and sizes["mixture"] < 128


@pytest.mark.parametrize(
    "nodes",
    [
        EncodedNodes(None, 0, 5, (0,), (FOLLOWS,), (66,)),  # a choice that was never received
        EncodedNodes(0, 0, 5, (-1,), (0,), (YOURS,)),  # one that was never sent
    ],
    ids=["choice", "own choice"],
)
def test_what_hangs_on_nothing_is_ignored(nodes: EncodedNodes) -> None:
    tree = PrefixTree(0)
    DraftExchange("device", rule_of("coin"), VOCAB, tree).receive(Drafts(0, 0, pack_nodes(nodes), []))
    assert list(tree.head.subtree()) == [tree.head] and tree.head.peer_dist is None


def test_nodes_kept_for_a_peer_are_bounded() -> None:
    """However much it sends: broad, deep, or the same nodes again under new ids."""
    tree = PrefixTree(0)
    exchange = DraftExchange("device", rule_of("coin"), VOCAB, tree)
    for start in range(0, 8 * MAX_LIVE_NODES, 200):
        parents = (-1, *(start + place for place in range(199)))
        tokens = (0, *((start // 200 + place) % VOCAB for place in range(199)))
        nodes = EncodedNodes(0, 0, start, parents, tokens, (65,) * 200)
        exchange.receive(Drafts(0, 0, pack_nodes(nodes), []))
    assert sum(1 for _ in tree.head.subtree()) <= MAX_LIVE_NODES + 256


def test_whole_distributions_of_a_large_vocabulary_are_held_up_to_a_limit_and_taken_again_as_the_head_moves() -> None:
    """A peer that sends all it may send to every node does not decide how much memory an answer takes."""
    vocab, nodes = 150_000, 40
    rule = make_aggregator("mixture", SamplingParams(temperature=1.0, seed=3), vocab_size=vocab)
    tree = PrefixTree(0)
    receiver = DraftExchange("device", rule, vocab, tree)
    whole = encode_head(Dist.dense(np.full(vocab, 1.0 / vocab)), precise=False)

    def send(first: int, count: int) -> list[int]:
        """A chain below the head, one node a message; the positions whose distributions are held."""
        head = tree.head.position
        for number in range(count):
            parent = -1 if number == 0 else first + number - 1
            level = EncodedNodes(None if number else head, 2, first + number, (parent,), (65 if number else 0,), None)
            receiver.receive(Drafts(0, 0, pack_nodes(level), [whole]))
        return [node.position for node in tree.head.subtree() if node.peer_dist is not None]

    fits = MAX_PEER_PROBS // vocab
    assert send(0, nodes) == list(range(fits))
    for _ in range(5):
        tree.advance(65)
    receiver.forget_dead()
    assert send(nodes, nodes) == list(range(5, 5 + fits)), "what is nearest to the head is taken first"


def test_choices_keep_to_their_budget_and_a_head_is_sent_whatever_was_spent() -> None:
    side: Side = "cloud"  # its budget is above what heads take
    chance, tree, targets = random.Random(5), PrefixTree(0), 200
    likely = dict[PrefixNode, float]()
    exchange = DraftExchange(side, rule_of("coin"), VOCAB, tree, uses=lambda _: likely)
    sizes: list[int] = []

    def scored(node: PrefixNode) -> PrefixNode:
        node.own_dist = OwnDist.of(random_dist(chance))
        return node

    for _ in range(targets):
        nodes = [tree.head] + [tree.head.child(first).child(second) for first in TOKENS for second in TOKENS]
        nodes[1:1] = [tree.head.child(first) for first in TOKENS]
        likely.update(dict.fromkeys(nodes, 0.95) | {tree.head: 1.0})
        sizes += [
            len(encode(each)) for each in exchange.encode([each for each in map(scored, nodes) if not each.own_id], 0)
        ]
        assert tree.head.own_id is not None
        tree.advance(chance.choice(TOKENS))
    # Where only what is certain would be sent, so much is overdrawn; a message more may have led there.
    overdrawn = CREDIT / LEAST_CHOICE + max(sizes) / CHOICE_BYTES[side]
    assert sum(sizes) <= CHOICE_BYTES[side] * (targets + overdrawn)
    assert sum(sizes) > 0.5 * CHOICE_BYTES[side] * targets
