"""A side's rows on a real engine: after any appends, targets and commits, each distribution is that of its path."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.aggregation.weights import NEGLIGIBLE_PROB
from paceline.core.batching.segment import Batch
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, T
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import SIDES, Branch, Effect, Forward, OutputRules, Prune, Scored, Side
from paceline.strategies.decoding.branch_decoder import RESCORED_TOKENS, BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from tests.strategies import oracle
from tests.strategies.cases import BRANCHES, SAMPLINGS, VOCAB, path

TOKENS = (65, 66, 67, 32)


def rules(sampling: SamplingParams) -> OutputRules:
    return OutputRules(sampling, 1, frozenset(), VOCAB)


class Play:
    """A decoder under random targets and drafts."""

    def __init__(self, seed: int, branches: tuple[Branch, ...], sampling: SamplingParams) -> None:
        self.chance = random.Random(seed)
        self.prefix = [self.chance.choice(TOKENS) for _ in range(self.chance.choice((0, 0, 3)))]
        self.branches, self.sampling = branches, sampling
        self.engine: Engine = FakeEngine(seed=1, spread=0.4)
        self.tree = PrefixTree(len(self.prefix))
        self.decoder = BranchDecoder(rules(sampling))
        self.answers: list[tuple[int, tuple[Dist, ...]]] = []
        self.scored: list[tuple[PrefixNode, Dist]] = []
        self.now = 0.0
        self.do(self.decoder.start(branches, self.prefix, self.tree.head, None))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Forward(ticket, segment):
                    (dists,) = self.engine.forward(Batch((segment,))).dists
                    self.answers.append((ticket, dists))
                case Prune(seq, keep, live):
                    self.engine.prune(seq, keep, live)
                case _:
                    raise AssertionError(effect)

    def answer(self) -> None:
        """Answer the forward of one branch; in any order."""
        self.now += 0.01
        ticket, dists = self.answers.pop(self.chance.randrange(len(self.answers)))
        for node in self.decoder.take(Scored(ticket, dists, self.now)):
            if node.alive and node.own_dist is not None:
                self.scored.append((node, node.own_dist.whole))

    def advance(self) -> None:
        """Append a target, mostly one of the drafts."""
        known = list(self.tree.head.children)
        drafted = known and self.chance.random() < 0.8
        self.tree.advance(self.chance.choice(known) if drafted else self.chance.choice(TOKENS))

    def append(self) -> None:
        head = self.tree.head
        self.do(self.decoder.commit_to(head))
        nodes = self.decoder.missing_rows(head)
        known = [node for node in head.subtree() if node.cached] + ([head] if nodes else [])
        for _ in range(self.chance.choice((0, 1, 3, 6))):
            if known:
                child = self.chance.choice(known).child(self.chance.choice(TOKENS))
                if not child.cached and child not in nodes:
                    nodes.append(child)
                    known.append(child)
        if nodes:
            self.do(self.decoder.append_rows(nodes, head, self.now))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("how", ["sampled", "filtered"])
def test_the_distribution_of_every_row_is_that_of_a_fresh_prefill_of_its_path(side: Side, how: str) -> None:
    deepest = trees = 0
    for seed in range(25):
        play = Play(seed, BRANCHES[side], SAMPLINGS[how])
        for _ in range(40):
            if play.answers and play.chance.random() < 0.6:
                play.answer()
            elif play.decoder.idle:
                play.append()
            elif play.chance.random() < 0.4:
                play.advance()  # while a forward is under way
            if play.decoder.idle and play.chance.random() < 0.3:
                play.advance()
            play.engine.check()
        fresh = FakeEngine(seed=1, spread=0.4)
        for node, dist in play.scored[:: 1 + len(play.scored) // 12]:
            expected, _ = oracle.side_dist(fresh, BRANCHES[side], [*play.prefix, *path(node)], SAMPLINGS[how])
            np.testing.assert_allclose(dist.probs, expected.probs, atol=1e-12)
            deepest = max(deepest, node.position)
        trees += sum(siblings > 1 for siblings in Counter(node.parent for node, _ in play.scored).values())
    assert deepest > 10 and trees > 50  # otherwise nothing was tried


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("length", [3, RESCORED_TOKENS, 100])
def test_a_prefix_is_scored_as_if_it_had_been_decoded_here(side: Side, length: int) -> None:
    """And nothing is kept of its distributions but the heads by which the next token is scored."""
    chance = random.Random(length)
    prefix = [chance.choice(TOKENS) for _ in range(length)]
    engine, tree = FakeEngine(seed=1, spread=0.4), PrefixTree(length)
    decoder = BranchDecoder(rules(SAMPLINGS["sampled"]), rescoring=True)
    for effect in decoder.start(BRANCHES[side], prefix, tree.head, None):
        assert isinstance(effect, Forward)
        decoder.take(Scored(effect.ticket, engine.forward(Batch((effect.segment,))).dists[0]))
    dist, log_h = oracle.side_dist(engine, BRANCHES[side], prefix, SAMPLINGS["sampled"], rescoring=True)
    assert tree.head.own_dist is not None and tree.head.log_evidence == log_h
    np.testing.assert_allclose(tree.head.own_dist.whole.probs, dist.probs, atol=1e-12)
    assert tree.head.branch_dists and all(len(each.ids) < 1 / NEGLIGIBLE_PROB for each in tree.head.branch_dists)


def test_forwards_are_timed_but_for_the_prefill() -> None:
    play = Play(0, BRANCHES["cloud"], SAMPLINGS["greedy"])
    play.now = 5.0
    play.answer()
    assert play.decoder.log_evidence is not None and len(play.answers) == 1  # the other document's answer is missing
    play.answer()
    assert play.decoder.timed is None
    play.tree.advance(65)
    play.do(play.decoder.append_rows(play.decoder.missing_rows(play.tree.head), play.tree.head, play.now))
    play.answer()
    play.answer()
    assert play.decoder.timed is not None
    rows, seconds = play.decoder.timed
    assert rows == 1 and seconds == pytest.approx(0.02)
    assert (play.decoder.forwards, play.decoder.rows) == (2, 2)


class Paths:
    """A constraint that allows the tokens of some paths, and counts the masks that are asked for."""

    def __init__(self, *paths: tuple[int, ...]) -> None:
        self._paths = paths
        self.asked: list[tuple[int, ...]] = []

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        self.asked.append(tuple(path))
        allowed = np.zeros(VOCAB, dtype=np.bool_)
        at = len(path)
        allowed[[each[at] for each in self._paths if each[:at] == tuple(path) and len(each) > at]] = True
        return allowed

    def complete(self, path: Sequence[int]) -> bool:
        return tuple(path) in self._paths

    def at_once(self, work: Callable[[], T]) -> T:
        return work()


@pytest.mark.parametrize("samples", [False, True])
def test_drafts_that_the_constraint_forbids_and_all_below_them_have_no_row_and_no_mask(samples: bool) -> None:
    mask = Paths((1, 2, 3), (1, 4, 5))
    tree = PrefixTree(0)
    output = replace(rules(SamplingParams()), mask=mask, eos_ids=frozenset({9}))
    decoder = BranchDecoder(output, lazy=True, samples=samples)
    decoder.start([Branch((7, 8), None)], [], tree.head, None)
    one = tree.head.child(1)
    drafts = [one, tree.head.child(6), one.child(2), tree.head.child(6).child(2), one.child(4), one.child(7)]
    drafts += [one.child(2).child(3), one.child(7).child(3), one.child(4).child(3)]
    mask.asked.clear()
    kept = decoder.admitted(tree.head, drafts)
    assert [path(node) for node in kept] == [(1,), (1, 2), (1, 4), (1, 2, 3)]
    assert mask.asked == [(), (1,), (1, 2), *([(1, 2, 3)] if samples else []), (1, 4)]
    mask.asked.clear()
    decoder.append_rows([tree.head, *kept], tree.head, 0.0)
    assert not mask.asked
