"""The tree of prefixes: a target keeps its subtree alive, and nothing is kept for the others."""

from __future__ import annotations

import gc
import random

from paceline.core.aggregation.aggregators import OwnDist, PeerDist
from paceline.strategies.decoding.prefix_tree import MAX_LIVE_NODES, PrefixNode, PrefixTree
from tests.strategies.cases import point


def grown(tree: PrefixTree, chance: random.Random, count: int) -> list[PrefixNode]:
    """So many random nodes at and below the head, with distributions."""
    nodes = [tree.head]
    for _ in range(count):
        nodes.append(chance.choice(nodes).child(chance.randrange(4)))
    for node in nodes:
        node.own_dist = OwnDist.of(point(65))
        node.set_peer(PeerDist(65, None), chance.randrange(1000))
    return nodes


def path(node: PrefixNode) -> tuple[int, ...]:
    return () if node.parent is None else (*path(node.parent), node.token)


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


def test_parents_come_before_their_children() -> None:
    tree = PrefixTree(0)
    grown(tree, random.Random(1), 60)
    seen: set[PrefixNode] = set()
    for node in tree.head.subtree():
        assert node is tree.head or node.parent in seen
        seen.add(node)


def test_a_node_of_a_dead_one_is_dead() -> None:
    tree = PrefixTree(0)
    dead = tree.head.child(1)
    tree.advance(2)
    assert not dead.child(5).alive


def test_decided_nodes_are_found_by_their_length_and_others_are_not() -> None:
    tree = PrefixTree(2)
    for token in (5, 6):
        tree.advance(token)
    for position, expected in ((2, ()), (3, (5,)), (4, (5, 6))):
        node = tree.decided(position)
        assert node is not None and path(node) == expected
    assert tree.decided(1) is None and tree.decided(5) is None


def test_of_two_distributions_received_the_more_detailed_stays() -> None:
    node = PrefixTree(0).head
    node.set_peer(PeerDist(1, point(1), 1), 7)
    node.set_peer(PeerDist(2, point(2), 0), 8)
    assert node.peer_dist is not None and (node.peer_dist.token, node.peer_id) == (1, 8)
    node.set_peer(PeerDist(3, point(3), 2), 9)
    assert node.peer_dist.token == 3


def test_to_forget_a_peer_keeps_what_was_computed_here() -> None:
    tree = PrefixTree(0)
    nodes = grown(tree, random.Random(2), 20)
    tree.forget_peer_ids()
    for node in nodes:
        assert node.own_dist is not None
        assert (node.peer_dist, node.peer_id, node.own_id, node.predicted) == (None, None, None, None)


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
