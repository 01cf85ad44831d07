"""Token trees: paths, merging, and verification that outputs the target's tokens for any drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import PlacedSegment, SeqId
from paceline.core.drafting.tree_search import TokenTree, merge
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, sample

VOCAB = 4


@st.composite
def token_trees(draw: st.DrawFn, max_size: int = 14) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, max_size))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


def texts(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tree.text(node) for node in range(len(tree))]


@pytest.mark.parametrize(
    ("tokens", "parents"), [((1, 2), (-1,)), ((1,), (0,)), ((1, 2), (-1, 1)), ((1,), (-2,)), ((5, 5), (-1, -1))]
)
def test_an_invalid_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parent"):
        TokenTree(tokens, parents)


def test_paths_children_and_depth_by_hand() -> None:
    tree = TokenTree((7, 8, 9, 7), (-1, 0, 0, 2))
    assert tree.paths() == ((0, 1), (0, 2, 3))
    assert tree.children(-1) == (0,)
    assert tree.children(0) == (1, 2)
    assert (tree.path(3), tree.text(3), tree.depth(3)) == ((0, 2, 3), (7, 9, 7), 2)
    assert (tree.path(-1), tree.depth(-1)) == ((), -1)
    assert tree.below(0) == TokenTree((8, 9, 7), (-1, -1, 1))
    assert TokenTree.chain([3, 4]) == TokenTree((3, 4), (-1, 0))


@given(token_trees(), st.integers(0, 50))
def test_the_mask_of_the_segment_is_the_path_and_its_positions_the_depth(tree: TokenTree, start: int) -> None:
    if len(tree) == 0:
        with pytest.raises(ValueError, match="tokens"):
            tree.segment(SeqId(1), start)
        return
    segment = PlacedSegment(SeqId(1), start, tree.tokens, tree.segment(SeqId(1), start).parents, ())
    for node, (row, position) in enumerate(zip(segment.mask(), segment.positions(), strict=True)):
        assert tuple(np.flatnonzero(row)) == tree.path(node)
        assert position == start + tree.depth(node)


@given(token_trees())
def test_paths_cover_all_nodes_and_end_in_leaves(tree: TokenTree) -> None:
    paths = tree.paths()
    assert {node for path in paths for node in path} == set(range(len(tree)))
    assert all(not tree.children(path[-1]) for path in paths)


@given(token_trees(), st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_a_verified_tree_gives_the_tokens_of_plain_decoding(tree: TokenTree, seed: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=seed)

    def target(prefix: tuple[int, ...]) -> int:
        row = np.random.default_rng([seed, *prefix]).normal(size=VOCAB)
        return sample(Dist.from_logits(row), params, len(prefix))

    walk = tree.walk(lambda node: target(tree.text(node)))
    plain: tuple[int, ...] = ()
    for _ in walk.output:
        plain += (target(plain),)
    assert walk.output == plain
    assert len(walk.output) == len(walk.accepted) + 1
    assert walk.accepted == (tree.path(walk.accepted[-1]) if walk.accepted else ())
    assert walk.output not in texts(tree)


def test_a_walk_visits_one_path_only() -> None:
    tree, visited = TokenTree((1, 2, 3, 4), (-1, -1, 1, 2)), []

    def target(node: int) -> int:
        visited.append(node)
        return {-1: 2, 1: 3, 2: 9}[node]

    assert tree.walk(target) == ((1, 2), (2, 3, 9))
    assert visited == [-1, 1, 2]


@given(st.lists(token_trees(), max_size=4))
def test_merging_keeps_every_path_once_and_the_first_tree_in_place(trees: list[TokenTree]) -> None:
    merged = merge(trees)
    assert sorted(texts(merged)) == sorted({path for tree in trees for path in texts(tree)})
    assert merge([merged, *trees]) == merged
    if trees:
        first = trees[0]
        assert (merged.tokens[: len(first)], merged.parents[: len(first)]) == (first.tokens, first.parents)


@given(token_trees())
def test_the_subtree_below_a_node_holds_the_rest_of_every_path_through_it(tree: TokenTree) -> None:
    for node in range(-1, len(tree)):
        prefix = tree.text(node)
        rest = [path[len(prefix) :] for path in texts(tree) if path[: len(prefix)] == prefix and path != prefix]
        assert sorted(texts(tree.below(node))) == sorted(rest)
