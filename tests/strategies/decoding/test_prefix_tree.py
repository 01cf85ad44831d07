"""The tree of prefixes: a target keeps its subtree alive, and nothing is kept for the others."""

from __future__ import annotations

import gc
import random

from paceline.core.aggregation.aggregators import OwnDist, PeerDist
from paceline.strategies.decoding.prefix_tree import MAX_LIVE_NODES, PrefixNode, PrefixTree
from tests.strategies.cases import path, point


def grown(tree: PrefixTree, chance: random.Random, count: int) -> list[PrefixNode]:
    """So many random nodes at and below the head, with distributions."""
    nodes = [tree.head]
    for _ in range(count):
        nodes.append(chance.choice(nodes).child(chance.randrange(4)))
    for node in nodes:
        node.own_dist = OwnDist.of(point(65))
        node.set_peer(PeerDist(65, None), chance.randrange(1000))
    return nodes


def test_a_target_keeps_what_hangs_below_it_and_nothing_else() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        tree = PrefixTree(3)
        nodes = grown(tree, chance, 40)
        token = chance.randrange(5)  # one of them is never drafted
        head = tree.advance(token)
        assert head is tree.head and head.position == 4 and tree.decided(4) is head
        below = {node for node in nodes if path(node)[:1] == (token,)} | {head}
        assert set(head.subtree()) == below and all(node.alive for node in below)
        for node in set(nodes) - below:
            assert not node.alive and node.own_dist is None and node.peer_dist is None


def test_of_two_distributions_received_the_more_detailed_stays() -> None:
    node = PrefixTree(0).head
    node.set_peer(PeerDist(1, point(1), 1), 7)
    node.set_peer(PeerDist(2, point(2), 0), 8)
    assert node.peer_dist is not None and (node.peer_dist.token, node.peer_id) == (1, 8)
    node.set_peer(PeerDist(3, point(3), 2), 9)
    assert node.peer_dist.token == 3


def test_it_is_full_when_as_many_as_may_be_are_alive() -> None:
    tree = PrefixTree(0)
    node = tree.head
    for token in range(MAX_LIVE_NODES - 1):
        assert not tree.full()
        node = node.child(token)
    assert tree.full()
    tree.advance(0)
    assert not tree.full()


def test_what_an_answer_leaves_needs_no_collector() -> None:
    """Else each leaves a thousand objects, and collecting those of some answers delays all the others."""
    gc.collect()
    gc.disable()
    try:
        tree = PrefixTree(0)
        for position in range(20_000):  # deep: freeing one node frees the next
            tree.head.child(position + 1).child(7)
            tree.advance(position)
        del tree
        assert gc.collect() == 0
    finally:
        gc.enable()
