"""Choice of the next rows: the most likely ones, as many as pay for themselves, and none that no target can need."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from lab.configs import a_config
from paceline.core.aggregation.aggregators import OwnDist, make_aggregator
from paceline.core.clock import AcceptanceByRank
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.ngram_drafter import margin_class
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.aggregate.tree_planner import MIN_WEIGHT, DraftTreePlanner
from paceline.strategies.base import Side
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.wire.messages import AggregateOptions, DraftLimits
from tests.strategies.cases import EOS, VOCAB, point

GREEDY = SamplingParams(temperature=0.0)
FAR = 10**6


def free(rows: int) -> float:
    """One more row costs nothing."""
    return 0.01 + 0.0 * rows


def make_planner(
    drafting: DraftLimits, sampling: SamplingParams = GREEDY, weights: Mapping[Side, float] | None = None
) -> DraftTreePlanner:
    rule = make_aggregator("mixture", sampling, vocab_size=VOCAB)
    config = a_config("cloud", True, sampling, FAR, EOS, VOCAB, AggregateOptions(drafting=drafting))
    return DraftTreePlanner(config, rule, OnlineStats(), weigh=lambda _: weights, ngram_drafts=None)


def table(chance: random.Random) -> OwnDist:
    """Five likely tokens of different probability."""
    probs = np.full(VOCAB, 1e-7)
    probs[chance.sample(range(60, 70), 5)] = [chance.random() ** 3 + 1e-3 for _ in range(5)]
    return OwnDist.of(Dist.dense(probs / probs.sum()))


def grown(seed: int, count: int) -> PrefixNode:
    """A tree with distributions on some of its nodes, whose rows are cached."""
    chance = random.Random(seed)
    head = PrefixTree(0).head
    nodes = [head]
    for _ in range(count):
        node = chance.choice(nodes)
        node.own_dist = node.own_dist or table(chance)
        nodes.append(node.child(node.own_dist.whole.top(4)[chance.randrange(4)][0]))
    for node in nodes:
        node.cached = node.own_dist is not None
    return head


def by_brute_force(head: PrefixNode, width: int, ahead: int) -> list[float]:
    """Weights of all rows that are missing, the largest first."""
    found: list[float] = []

    def visit(node: PrefixNode, weight: float) -> None:
        if not node.cached:
            found.append(weight)
        if node.own_dist is None or node.position - head.position >= ahead:
            return
        (first, p), (_, q) = node.own_dist.whole.top(2)
        assert p >= q and first >= 0
        shares = AcceptanceByRank().probs(margin_class(math.log(p) - math.log(q)))
        for (token, _), share in zip(node.own_dist.whole.top(width), shares, strict=False):
            if weight * share >= MIN_WEIGHT:
                visit(node.child(token), weight * share)

    visit(head, 1.0)
    return sorted(found, reverse=True)


def weight_of(node: PrefixNode) -> float:
    """Weight of a node by the same prior."""
    if node.parent is None or node.parent.own_dist is None:
        return 1.0
    tops = node.parent.own_dist.whole.top(8)
    rank = [token for token, _ in tops].index(node.token)
    margin = math.log(tops[0][1]) - math.log(tops[1][1])
    return weight_of(node.parent) * AcceptanceByRank().probs(margin_class(margin))[rank]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_the_most_likely_rows_come_first(width: int, rows: int) -> None:
    for seed in range(40):
        head = grown(seed, 12)
        expected = by_brute_force(head, width, 6)[:rows]
        picked = make_planner(DraftLimits(width, rows, 6)).select(head, free, 1.0, FAR, alone=False)
        assert [weight_of(node) for node in picked] == pytest.approx(expected)
        assert len(set(picked)) == len(picked) and not any(node.cached for node in picked)


def test_parents_come_before_their_children() -> None:
    """Several rows of one path, where the other side's distributions draft below rows this side has not computed."""
    chain = node = PrefixTree(0).head
    rule = make_aggregator("mixture", GREEDY)
    for token in (70, 71, 72, 73):
        node.set_peer(rule.to_wire("device", OwnDist.of(point(token)), node.position), token)
        node = node.child(token)
    picked = make_planner(DraftLimits(2, 8, 8)).select(chain, free, 1.0, FAR, alone=False)
    assert picked[0] is chain and [node.token for node in picked if node.token >= 70][:4] == [70, 71, 72, 73]
    for place, each in enumerate(picked[1:], start=1):
        assert each.parent in picked[:place]


def test_width_1_makes_a_chain() -> None:
    for seed in range(30):
        head = PrefixTree(0).head
        head.cached, head.own_dist = True, table(random.Random(seed))
        planner = make_planner(DraftLimits(1, 16, 8))
        node = head
        for depth in range(1, 9):
            (node,) = planner.select(head, free, 1.0, FAR, alone=False)
            assert node.position == depth
            node.cached, node.own_dist = True, table(random.Random(f"{seed} {depth}"))
        assert planner.select(head, free, 1.0, FAR, alone=False) == []


@pytest.mark.parametrize(("ahead", "alone"), [(0, False), (32, True)])
def test_token_by_token_and_alone_nothing_is_computed_ahead(ahead: int, alone: bool) -> None:
    head = PrefixTree(0).head
    head.own_dist = table(random.Random(1))
    planner = make_planner(DraftLimits(4, 16, ahead))
    assert planner.select(head, free, 1.0, FAR, alone=alone) == [head]
    head.cached = True
    assert planner.select(head, free, 1.0, FAR, alone=alone) == []


def test_nothing_is_computed_below_an_end_token_or_beyond_the_limit() -> None:
    head = PrefixTree(0).head
    probs = np.full(VOCAB, 1e-5)
    probs[256], probs[65] = 0.6, 0.39
    head.own_dist, head.cached = OwnDist.of(Dist.dense(probs / probs.sum())), True
    planner = make_planner(DraftLimits(2, 16, 8))
    assert [node.token for node in planner.select(head, free, 1.0, FAR, alone=False)] == [65]
    assert planner.select(head, free, 1.0, 1, alone=False) == []  # position 0 is the last that is wanted


def steep(rows: int) -> float:
    """Every row costs as much as the first."""
    return 0.01 * rows


@pytest.mark.parametrize(("seconds", "delay", "most"), [(steep, 0.0, 1), (steep, 0.05, 16), (free, 0.0, 16)])
def test_a_row_is_computed_only_where_it_saves_more_than_it_costs(
    seconds: Callable[[int], float], delay: float, most: int
) -> None:
    for seed in range(20):
        head = grown(seed, 6)
        picked = make_planner(DraftLimits(4, 16, 8)).select(head, seconds, delay, FAR, alone=False)
        everything = make_planner(DraftLimits(4, 16, 8)).select(head, free, delay, FAR, alone=False)
        assert picked == everything[: len(picked)] and 1 <= len(picked) <= most
        saved = delay + seconds(1)
        for count, node in enumerate(picked, start=1):
            assert count == 1 or weight_of(node) * saved >= seconds(count) - seconds(count - 1)
        if len(picked) < len(everything):
            left = everything[len(picked)]
            assert weight_of(left) * saved < seconds(len(picked) + 1) - seconds(len(picked))


def test_where_both_distributions_are_known_the_only_child_is_the_target() -> None:
    rule = make_aggregator("mixture", GREEDY, vocab_size=VOCAB)
    planner = make_planner(DraftLimits(4, 16, 8), weights={"cloud": 0.3, "device": 0.7})
    head = node = PrefixTree(0).head
    for theirs in (70, 71, 72):
        node.own_dist, node.cached = OwnDist.of(point(66)), True
        node.set_peer(rule.to_wire("device", OwnDist.of(point(theirs)), node.position), theirs)
        node = node.child(theirs)
    picked = planner.select(head, free, 1.0, FAR, alone=False)
    assert picked == [node]  # 70, 71, 72 are certain: no other child of any of them is worth a row


def test_it_learns_which_drafts_are_accepted() -> None:
    """Where targets are always the second draft, that is the row to compute."""
    planner = make_planner(DraftLimits(2, 1, 8))
    tree = PrefixTree(0)
    probs = np.full(VOCAB, 1e-5)
    probs[65], probs[66] = 0.5, 0.45
    dist = OwnDist.of(Dist.dense(probs / probs.sum()))
    tree.head.own_dist, tree.head.cached = dist, True
    (first,) = planner.select(tree.head, free, 1.0, FAR, alone=False)
    assert first.token == 65
    for _ in range(30):
        assert planner.first_drafts(tree.head) == {"cloud": 65}
        assert planner.was_drafted(tree.head, 66) == {"cloud": True}
        assert planner.was_drafted(tree.head, 67) == {"cloud": False}
        planner.observe_target(tree.head, 66)
        tree.advance(66)
        tree.head.own_dist, tree.head.cached = dist, True
    (first,) = planner.select(tree.head, free, 1.0, FAR, alone=False)
    assert first.token == 66
