"""A tree of drafts whose rows are sent in segments, several under way: invariants under any order of what happens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.baselines.flowspec import LayeredTree
from paceline.core.batching.segment import ROOT, Batch, Segment, SeqId
from paceline.core.drafting.ngram_drafter import NO_DRAFT, DraftTree
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.sequence_table import SequenceTable
from paceline.strategies.base import Branch, Forward, OutputRules, Prune, Scored
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from tests.core.drafting.draft_paths import text

SEQ, PROMPT, VOCAB = SeqId(0), (1, 2), 8
ROW = Dist.dense(np.full(VOCAB, 1 / VOCAB))


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


class Play:
    """A tree whose head is the first token after the prompt, and its decoder."""

    def __init__(self, kind: type[PrefixTree] = PrefixTree) -> None:
        self.tree = kind(0)
        output = OutputRules(SamplingParams(), 1, frozenset(), VOCAB)
        self.decoder = BranchDecoder(output, lazy=True, several=True)
        (prompt,) = self.decoder.start([Branch(PROMPT, None)], (), self.tree.head, None)
        assert isinstance(prompt, Forward)
        self.decoder.take(Scored(prompt.ticket, (ROW,)))
        self.tree.advance(0)

    @property
    def nodes(self) -> list[PrefixNode]:
        """In the order of creation."""
        return sorted(self.tree.head.subtree(), key=lambda node: node.number)

    @property
    def paths(self) -> set[tuple[int, ...]]:
        above = self.tree.head.position
        return {tuple(each.token for each in node.path_below(above)) for node in self.tree.head.subtree()} - {()}

    def send(self, nodes: Sequence[PrefixNode]) -> Forward:
        (forward,) = self.decoder.append_rows(nodes, self.tree.head, 0.0)
        assert isinstance(forward, Forward)
        return forward

    def prune(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Rows to commit and those that stay open; None: all of them stay."""
        effects = self.decoder.commit_to(self.tree.head)
        if not effects:
            return None
        (prune,) = effects
        assert isinstance(prune, Prune)
        return prune.keep, prune.live

    def check(self) -> None:
        seen: set[PrefixNode] = set()
        for node in self.nodes:
            assert node.alive and not node.dead
            if node is not self.tree.head:
                parent = node.parent
                assert parent in seen and parent.children[node.token] is node and node.number > parent.number
                assert node.score <= parent.score and node.position == parent.position + 1
                assert node.row is None or (parent.row is not None and parent.row < node.row)
            seen.add(node)
        assert self.tree.head.score == 1.0


def texts(drafted: DraftTree) -> set[tuple[int, ...]]:
    return {text(drafted, node) for node in range(len(drafted))}


@given(drafts(), drafts())
def test_a_merge_holds_both_trees_once_and_the_first_one_first(first: DraftTree, second: DraftTree) -> None:
    play = Play()
    tree = play.tree
    tree.merge(first)
    before = play.nodes
    assert play.paths == texts(first)
    added = tree.merge(second)
    play.check()
    assert play.paths == texts(first) | texts(second)
    assert play.nodes == [*before, *added] and tree.num_sent == 0
    assert tree.merge(second) == [] == tree.merge(NO_DRAFT) and len(play.nodes) == len(before) + len(added)


@given(drafts(), st.integers(1, 8), st.booleans())
def test_segments_hold_parents_before_children_and_the_best_nodes_first(
    drafted: DraftTree, size: int, layered: bool
) -> None:
    play = Play(LayeredTree if layered else PrefixTree)
    play.tree.merge(drafted)
    sent: list[PrefixNode] = []
    seen = {ROOT}
    while nodes := play.tree.best(size):
        segment = play.send(nodes).segment
        sent += nodes
        play.check()
        assert segment.tokens == tuple(node.token for node in nodes) and segment.parents is not None
        for parent, name in zip(segment.parents, segment.node_ids, strict=True):
            assert parent in seen
            seen.add(name)
    assert sent[0] is play.tree.head and len(sent) == play.tree.num_sent == 1 + len(play.paths)
    assert [node.row for node in sent] == list(range(len(sent)))
    key = [-node.position if layered else node.score for node in sent]
    assert key == sorted(key, reverse=True)


@given(drafts(), st.data())
def test_two_prunes_are_one(drafted: DraftTree, data: st.DataObject) -> None:
    """prune(prune(T, a), b) = prune(T, ab): the tree under a node does not depend on where the walk stopped before."""
    twice, once = Play(), Play()
    for play in (twice, once):
        play.tree.merge(drafted)
        play.send(play.tree.waiting)
    walk: list[int] = []
    live: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    while twice.tree.head.children and data.draw(st.booleans()):
        walk.append(data.draw(st.sampled_from(sorted(twice.tree.head.children))))
        twice.tree.advance(walk[-1])
        pruned = twice.prune()
        assert pruned is not None
        keep, live = (*keep, *pruned[0]), pruned[1]
    for token in walk:
        once.tree.advance(token)
    assert once.paths == twice.paths
    assert [node.score for node in once.nodes] == pytest.approx([node.score for node in twice.nodes])
    if walk:
        assert once.prune() == (keep, live)
        assert all(a < b for a in keep for b in live), "what is committed was sent before what stays"


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_any_course_of_an_answer_keeps_the_invariants(seed: int, depth: int, size: int, layered: bool) -> None:
    """Random drafts, tokens and answers in order, against a stage's table that learns of each prune late or early."""
    chance = random.Random(seed)
    play = Play(LayeredTree if layered else PrefixTree)
    tree, decoder = play.tree, play.decoder
    head_side, stage = (SequenceTable(vocab_size=VOCAB, max_positions=10_000) for _ in range(2))
    for table in (head_side, stage):
        table.written(table.place(Batch((Segment(SEQ, 0, PROMPT),))))
    under_way: list[tuple[int, Sequence[PrefixNode]]] = []
    news: list[tuple[str, object]] = []  # what the stage has not heard yet: segments in order, prunes at any time
    known: set[PrefixNode] = set()
    sent = dropped = 0
    for _ in range(30):
        tree.drop_waiting()
        tree.merge(_random_draft(chance))
        play.check()
        while decoder.under_way < depth and (nodes := tree.best(size)):
            forward = play.send(nodes)
            head_side.written(head_side.place(Batch((forward.segment,))))
            news.append(("segment", forward.segment))
            under_way.append((forward.ticket, nodes))
        if not under_way:
            continue
        ticket, answered = under_way.pop(0)
        alive = [index for index, node in enumerate(answered) if node.alive or chance.random() < 0.5]
        sent, dropped = sent + len(answered), dropped + len(answered) - len(alive)
        known |= {answered[index] for index in alive}
        assert decoder.take(Scored(ticket, (ROW,) * len(alive), scored=tuple(alive))) == tuple(answered)
        while decoder.dist(tree.head) is not None:
            assert tree.head in known and tree.head.row is not None
            tree.advance(chance.choice([*tree.head.children, chance.randrange(6)]))
            play.check()
        decoder.pop_branch_dists()
        assert not known.intersection(tree.head.subtree()), "what a prune leaves has never been answered"
        pruned = play.prune()
        if pruned is not None:
            horizon = head_side.last_id(SEQ)
            head_side.prune(SEQ, *pruned, horizon)
            assert set(head_side.tree(SEQ).ids) == set(pruned[1])
            news.append(("prune", (*pruned, horizon)))
        _hear(stage, news, chance)
    assert (decoder.rows - 1, decoder.dropped) == (sent, dropped)
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
    play = Play()
    play.tree.merge(DraftTree((1, 2, 1, 1, 2, 1, 2), (-1, -1, 0, 1, 0, 2, 2), (0.8, 0.6, 0.5, 0.4, 0.25, 0.2, 0.1)))
    play.send(play.tree.best(8))
    play.tree.advance(1)
    head = play.tree.advance(1)
    assert [node.score for node in play.nodes] == pytest.approx([1.0, 0.4, 0.2]) and play.nodes[0] is head
    assert play.prune() == ((0, 1), (3, 6, 7)) and play.decoder.under_way == 1
    assert play.prune() is None
    play.tree.advance(7)
    assert play.prune() == ((3,), ()) and play.decoder.under_way == 0, "all that was under way is invalid"


def test_a_draft_that_may_not_be_verified_is_left_out_with_what_hangs_below_it() -> None:
    play = Play()
    play.tree.merge(DraftTree((1, 2, 3), (-1, 0, -1), (0.9, 0.8, 0.1)), lambda _, token: token != 1)
    assert play.paths == {(3,)}
    (node,) = play.tree.head.children.values()
    play.tree.add(node, 5, 0.9)
    play.tree.drop(node)
    assert play.paths == set() and play.tree.waiting == [play.tree.head]
    play.check()
