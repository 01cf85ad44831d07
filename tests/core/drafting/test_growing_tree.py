"""The draft tree of pipelined speculation: its invariants under any order of drafts, segments, answers and tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.baselines.flowspec import LayeredTree
from paceline.core.batching.segment import ROOT, Batch, Segment, SeqId
from paceline.core.drafting.growing_tree import DraftNode, GrowingTree
from paceline.core.drafting.tree_search import NO_DRAFT, DraftTree
from paceline.engine.sequence_table import SequenceTable
from tests.core.drafting.draft_paths import text

SEQ = SeqId(1)


@st.composite
def drafts(draw: st.DrawFn, most: int = 20) -> DraftTree:
    """A tree over few tokens, with scores that fall along its paths."""
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, most)))]
    tokens: list[int] = []
    used: dict[int, int] = {}
    for parent in parents:
        tokens.append(used.get(parent, 0))
        used[parent] = tokens[-1] + 1
    probs: list[float] = []
    for parent in parents:
        probs.append((1.0 if parent < 0 else probs[parent]) * draw(st.sampled_from((1.0, 0.9, 0.5, 0.25, 0.0))))
    return DraftTree(tuple(tokens), tuple(parents), tuple(probs))


def path(tree: GrowingTree, node: DraftNode) -> tuple[int, ...]:
    tokens: list[int] = []
    while node is not tree.head:
        tokens.append(node.token)
        assert node.parent is not None
        node = node.parent
    return tuple(reversed(tokens))


def paths(tree: GrowingTree) -> set[tuple[int, ...]]:
    return {path(tree, node) for node in tree.nodes if node is not tree.head}


def texts(drafted: DraftTree) -> set[tuple[int, ...]]:
    return {text(drafted, node) for node in range(len(drafted))}


def started(*, kind: type[GrowingTree] = GrowingTree) -> GrowingTree:
    """A tree whose head is the first token after the prompt."""
    tree = kind(0)
    tree.head.known = True
    tree.advance(0)
    return tree


def answer(nodes: Iterable[DraftNode]) -> None:
    for node in nodes:
        if node.alive:
            node.known = True


@given(drafts(), drafts())
def test_a_merge_holds_both_trees_once_and_the_first_one_first(first: DraftTree, second: DraftTree) -> None:
    tree = started()
    tree.merge(first)
    before = tree.nodes
    assert paths(tree) == texts(first)
    added = tree.merge(second)
    tree.check()
    assert paths(tree) == texts(first) | texts(second)
    assert tree.nodes == (*before, *added)
    assert tree.merge(second) == [] == tree.merge(NO_DRAFT) and len(tree) == len(before) + len(added)


@given(drafts(), st.integers(1, 8), st.booleans())
def test_segments_hold_parents_before_children_and_the_best_nodes_first(
    drafted: DraftTree, size: int, layered: bool
) -> None:
    tree = started(kind=LayeredTree if layered else GrowingTree)
    tree.merge(drafted)
    sent: list[DraftNode] = []
    while nodes := tree.best(size):
        tree.send(nodes)
        sent += nodes
        tree.check()
    assert sent[0] is tree.head and len(sent) == len(tree) and [node.row for node in sent] == list(range(len(sent)))
    key = [-node.position if layered else node.score for node in sent]
    assert key == sorted(key, reverse=True)
    seen = {ROOT}
    for node in sent:
        assert tree.parent_row(node) in seen
        assert node.row is not None
        seen.add(node.row)


@given(drafts(), st.data())
def test_two_prunes_are_one(drafted: DraftTree, data: st.DataObject) -> None:
    """prune(prune(T, a), b) = prune(T, ab): the tree under a node does not depend on where the walk stopped before."""
    twice, once = started(), started()
    for tree in (twice, once):
        tree.merge(drafted)
        tree.send(tree.best(len(tree)))
    walk: list[int] = []
    live: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    while twice.head.children and data.draw(st.booleans()):
        walk.append(data.draw(st.sampled_from(sorted(twice.head.children))))
        twice.head.known = True
        twice.advance(walk[-1])
        pruned = twice.commit()
        assert pruned is not None
        keep, live = (*keep, *pruned.keep), pruned.live
    for token in walk:
        once.head.known = True
        once.advance(token)
    assert paths(once) == paths(twice)
    assert [node.score for node in once.nodes] == pytest.approx([node.score for node in twice.nodes])
    if walk:
        assert once.commit() == (keep, live)
        assert all(a < b for a in keep for b in live), "what is committed was sent before what stays"


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_any_course_of_an_answer_keeps_the_invariants(seed: int, depth: int, size: int, layered: bool) -> None:
    """Random drafts, tokens and answers in order, against a stage's table that learns of each prune late or early."""
    chance = random.Random(seed)
    tree = started(kind=LayeredTree if layered else GrowingTree)
    head_side, stage = (SequenceTable(vocab_size=8, max_positions=10_000) for _ in range(2))
    for table in (head_side, stage):
        table.written(table.place(Batch((Segment(SEQ, 0, (1, 2)),))))
    committed = 2
    under_way: list[list[DraftNode]] = []
    news: list[tuple[str, object]] = []  # what the stage has not heard yet: segments in order, prunes at any time
    wanted: set[int] = set()  # rows whose answer was used
    for _ in range(30):
        tree.forget_waiting()
        tree.merge(_random_draft(chance))
        tree.check()
        while len(under_way) < depth and (nodes := tree.best(size)):
            start = committed + tree.num_open_rows
            tree.send(nodes)
            segment = Segment(
                SEQ,
                start,
                tuple(node.token for node in nodes),
                tuple(tree.parent_row(node) for node in nodes),
                "all",
                tuple(node.row for node in nodes if node.row is not None),
            )
            head_side.written(head_side.place(Batch((segment,))))
            news.append(("segment", segment))
            under_way.append(nodes)
        if not under_way:
            continue
        answer(under_way.pop(0))
        while tree.head.known:
            assert tree.head.row is not None and tree.head.row not in wanted, "a row's answer is used once"
            wanted.add(tree.head.row)
            tree.advance(chance.choice([*tree.head.children, chance.randrange(6)]))
            tree.check()
        assert not any(node.known for node in tree.nodes), "what a prune leaves has never been answered"
        pruned = tree.commit()
        if pruned is not None:
            horizon = head_side.last_id(SEQ)
            head_side.prune(SEQ, *pruned, horizon)
            committed += len(pruned.keep)
            assert head_side.length(SEQ) == committed + tree.num_open_rows
            assert set(head_side.tree(SEQ).ids) == set(pruned.live)
            news.append(("prune", (*pruned, horizon)))
        _hear(stage, news, chance)
    for kind, item in news:
        _apply(stage, kind, item)
    assert stage.length(SEQ) == head_side.length(SEQ) and stage.tree(SEQ) == head_side.tree(SEQ)


def _hear(stage: SequenceTable, news: list[tuple[str, object]], chance: random.Random) -> None:
    """Deliver some of it. Prunes overtake the segments before them, and are in order among themselves."""
    for _ in range(chance.randrange(4)):
        prunes = [index for index, (kind, _) in enumerate(news) if kind == "prune"]
        if prunes and chance.random() < 0.5:
            _apply(stage, *news.pop(prunes[0]))
        elif news and news[0][0] == "segment":
            _apply(stage, *news.pop(0))


def _apply(stage: SequenceTable, kind: str, item: object) -> None:
    if kind == "segment":
        assert isinstance(item, Segment)
        stage.written(stage.place(Batch((item,)), first_stage=False))
    else:
        assert isinstance(item, tuple)
        stage.prune(SEQ, *item)


def _random_draft(chance: random.Random) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(chance.randrange(12)):
        parent, token = chance.randrange(-1, len(tokens)), chance.randrange(6)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    probs = [chance.random() for _ in tokens]  # of a drafter that scores children above their parents
    return DraftTree(tuple(tokens), tuple(parents), tuple(probs))


def test_what_hangs_below_another_token_is_dropped_and_scores_are_given_the_new_head() -> None:
    """Figure 2 of the paper: of the rows 0 to 7, rows 0 and 1 are accepted and 3, 6 and 7 stay."""
    tree = started()
    tree.merge(DraftTree((1, 2, 1, 1, 2, 1, 2), (-1, -1, 0, 1, 0, 2, 2), (0.8, 0.6, 0.5, 0.4, 0.25, 0.2, 0.1)))
    tree.send(tree.best(8))
    tree.head.known = True
    tree.advance(1).known = True
    head = tree.advance(1)
    assert [node.score for node in tree.nodes] == pytest.approx([1.0, 0.4, 0.2]) and tree.nodes[0] is head
    assert tree.commit() == ((0, 1), (3, 6, 7))
    assert tree.commit() is None
    head.known = True
    tree.advance(9)
    assert tree.commit() == ((3,), ()) and tree.num_open_rows == 0, "all that was under way is invalid"


def test_a_draft_that_may_not_be_verified_is_left_out_with_what_hangs_below_it() -> None:
    tree = started()
    drafted = DraftTree((1, 2, 3), (-1, 0, -1), (0.9, 0.8, 0.1))
    tree.merge(drafted, lambda _, token: token != 1)
    assert paths(tree) == {(3,)}
    (node,) = tree.head.children.values()
    tree.add(node, 5, 0.9)
    tree.discard(node)
    assert paths(tree) == set() and len(tree) == 1
    tree.check()
