"""The machine of `aggregate`, who decides, and which rows are computed ahead."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from lab.configs import a_config
from lab.simulation import SimulatedSession, Simulation
from paceline.core.aggregation.aggregators import AggregatorName, OwnDist, make_aggregator
from paceline.core.clock import FIRST_S, AcceptanceByRank
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.ngram_drafter import margin_class
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.aggregate.tree_planner import MIN_WEIGHT, DraftTreePlanner
from paceline.strategies.base import SIDES, Effect, Forward, Received, Side, Started, other
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions, DetailRequest, DraftLimits, Drafts, Handover, SpeedReport, Targets
from paceline.wire.payloads import unpack_nodes
from tests.strategies import oracle
from tests.strategies.cases import (
    BRANCHES,
    CHAIN,
    EOS,
    MANNERS,
    MAX_TOKENS,
    PROMPT,
    SAMPLINGS,
    TOKEN_BY_TOKEN,
    TREE,
    VOCAB,
    Hand,
    Manner,
    cloud,
    decided,
    device,
    drafted,
    engines,
    found,
    handed,
    has,
    heard,
    job,
    passed_over_after,
    point,
    says,
    two,
    weighed,
    without_documents,
)
from tests.strategies.conformance.laws import reference, settled
from tests.strategies.conformance.worlds import REORDERING, SHORT

EVERY_FRONT = pytest.mark.parametrize("front", SIDES)


# ---- waiting --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("front", [True, False])
def test_the_side_that_decides_waits_for_its_own_documents(front: bool) -> None:
    hand = device(front=front)
    hand.on(Started(0.0), *heard(0, 65, log_weight=1.0))
    assert not hand.sent and not hand.emitted
    hand.on(found())
    assert not hand.sent and not hand.emitted  # nor before its engine has read them
    hand.say = lambda _: point(66)
    hand.answer()
    target = hand.sent[0]
    assert isinstance(target, Targets) and target.tokens == [65]  # the heavier side's
    assert target.lanes == (b"" if front else b"\x01")


@pytest.mark.parametrize(
    ("manner", "writer", "front"), list(zip(MANNERS.values(), cycle(SIDES), cycle((*SIDES, *SIDES[::-1])))), ids=MANNERS
)
def test_where_neither_side_has_documents_the_writers_text_is_written(
    manner: Manner, writer: Side, front: Side
) -> None:
    """As if it alone had one."""
    strategy, sampling = STRATEGIES["aggregate"], settled(manner, SAMPLINGS["sampled"])
    empty = {side: without_documents(BRANCHES[side]) for side in SIDES}
    weighs = empty | {writer: (replace(empty[writer][0], score=0.0),)}
    expected = reference(strategy, front, sampling, manner, weighs, max_tokens=SHORT)
    this = replace(manner, options=(*manner.options, ("writer", writer)))
    request = job(strategy, front, sampling, branches=empty, manner=this, max_tokens=SHORT)
    assert Simulation(request, engines(), network=REORDERING).run().tokens == expected
    if manner.rule == "mixture":
        assert expected == oracle.continued_alone(engines()[writer], empty[writer], (), sampling, SHORT, EOS)


# ---- a peer that leaves ---------------------------------------------------------------------------------------------
@EVERY_FRONT
@pytest.mark.parametrize("rule", ["mixture", "coin"])
def test_a_peer_whose_context_ends_leaves_and_the_front_goes_on_alone(front: Side, rule: AggregatorName) -> None:
    room, sampling = 5, SAMPLINGS["sampled"]
    expected = oracle.REFERENCES[rule](engines(), BRANCHES, sampling, MAX_TOKENS, EOS)
    this = job(STRATEGIES["aggregate"], front, sampling, room={other(front): room}, manner=Manner(rule))
    world = Simulation(this, engines())
    answer = world.run()
    peer: SimulatedSession = world.session(other(front))
    assert peer.finished is not None and peer.finished.reason == "length"
    assert answer.finished is not None and answer.finished.reason in ("length", "stop")
    together = len(answer.tokens) - int(answer.finished.stats["alone"])
    together += answer.finished.reason == "stop"
    assert room <= together <= room + 1
    assert answer.tokens[:together] == expected[:together]
    assert answer.tokens == oracle.continued_alone(
        engines()[front], BRANCHES[front], expected[:together], sampling, MAX_TOKENS, EOS
    )


# ---- trees ----------------------------------------------------------------------------------------------------------
def test_a_target_that_was_the_second_guess_is_computed_already_and_the_first_is_dropped() -> None:
    hand = cloud(max_tokens=100, drafting=DraftLimits(width=2, rows=6, ahead=4))
    hand.say = lambda path: two(70, 71) if not path else point(65)
    hand.begin()
    assert {(70,), (71,)} <= set(hand.rows)
    before = len(hand.rows)
    hand.on(decided(0, 71))
    hand.answer()
    assert not any(path == (71,) or path[:1] == (70,) for path in hand.rows[before:])  # `Hand` checks the commit too


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("width", "rows"), [(1, 1), (4, 16)])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_no_side_computes_further_ahead_than_it_may(side: Side, width: int, rows: int, ahead: int) -> None:
    hand = Hand(Aggregate, side, front=True, max_tokens=100, drafting=DraftLimits(width, rows, ahead))
    hand.begin()
    assert max(len(path) for path in hand.rows[len(PROMPT) - 1 :]) == ahead
    hand.on(*heard(0, 65, log_weight=5.0), *([decided(0, 65)] if side == "cloud" else []))
    hand.answer()
    assert max(len(path) for path in hand.rows) == ahead + 1


def test_a_slow_side_verifies_in_one_forward_what_a_fast_one_has_drafted() -> None:
    """The peer's distributions serve as drafts, where it has none of its own yet."""
    hand = device(max_tokens=100, drafting=DraftLimits(width=1, rows=4, ahead=8))
    hand.say = lambda path: point((70, 71, 72, 73, 74)[min(len(path), 4)])
    hand.on(Started(0.0), *heard(0, 70, 71, 72, 73, log_weight=0.5), found())
    hand.answer_one()  # the prefill: the first target, and rows for the next ones
    assert hand.tokens == [70]
    hand.answer_one()
    assert hand.tokens == [70, 71, 72, 73]


# ---- detail of a distribution ---------------------------------------------------------------------------------------
def test_what_a_head_does_not_settle_is_asked_for_once_in_more_detail() -> None:
    hand = device(max_tokens=20)
    hand.say = lambda _: point(66)
    hand.begin()
    effects = hand.on(*heard(0, 65))  # 0.9 against 0.9, of equal weight
    (asked,) = [message for message in says(effects) if isinstance(message, DetailRequest)]
    assert (asked.node, asked.level) == (1000, 1) and not hand.emitted
    assert not says(hand.on(weighed(0.0)))  # not again
    again = next(
        message
        for message in says([*hand.wake_until(hand.now + 2.5), *hand.on(weighed(0.0))])
        if isinstance(message, DetailRequest)
    )
    assert again == asked  # unless it may have been lost
    peer = cloud(front=False, max_tokens=20)
    peer.begin()
    (precise,) = says(peer.on(Received(DetailRequest(0, 0, 0, 1))))
    assert isinstance(precise, Drafts)
    nodes = unpack_nodes(precise.nodes)
    assert (nodes.first, nodes.level, nodes.position) == (0, 1, 0)
    assert len(precise.dists[0].probs) == 8 * 256


@pytest.mark.parametrize("node", [0, 5, 10**6])
def test_of_a_node_that_is_dead_or_was_never_there_nothing_is_sent(node: int) -> None:
    peer = cloud(front=False, max_tokens=20, drafting=DraftLimits(width=1, rows=1, ahead=5))
    peer.begin()
    peer.on(decided(0, 70))  # nothing that was drafted is alive
    assert not says(peer.on(Received(DetailRequest(0, 0, node, 1))))


# ---- what is counted ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("side", SIDES)
def test_accepted_and_drafted_are_what_happened(side: Side) -> None:
    """Drafts of the side that follows: two accepted, one rejected, and one more accepted."""
    hand = Hand(Aggregate, side, front=True, max_tokens=4, drafting=CHAIN)
    if side == "device":
        hand.say = lambda path: point(70 if len(path) == 2 else 65)
        hand.begin(5.0)
        hand.on(*heard(0, 65, 65, 65, log_weight=0.0))
        hand.answer()
        assert hand.tokens == [65, 65, 70]
        hand.on(drafted(3, 65))
    else:
        hand.begin()
        hand.on(decided(0, 65, 65), decided(2, 70))
        hand.answer()
        hand.on(decided(3, 65))
    stats = hand.finish.stats
    assert (stats["drafted"], stats["accepted"], stats["alone"], stats["handovers"]) == (4, 3, 0, 0)
    forwards = [effect for effect in hand.effects if isinstance(effect, Forward)]
    assert stats["forwards"] <= len(forwards) and stats["rows"] >= stats["forwards"]


def test_the_speed_is_sent_once_it_is_known_and_when_it_has_changed() -> None:
    hand = Hand(Aggregate, "cloud", front=False, private=False, rtt=0.1, max_tokens=1000, drafting=TOKEN_BY_TOKEN)
    hand.begin()

    def decode(seconds: float, times: int) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(times):
            at = sum(isinstance(effect, Forward) for effect in hand.effects) - 1
            effects += hand.on(decided(at, 70))
            hand.now += seconds
            effects += hand.answer()
        return effects

    reports = [message for message in says(decode(0.5, 3)) if isinstance(message, SpeedReport)]
    assert [round(message.decode_s, 3) for message in reports] == [0.5]
    assert [m for m in says(decode(0.5, 20)) if isinstance(m, SpeedReport)] == []
    slower = [message for message in says(decode(2.0, 20)) if isinstance(message, SpeedReport)]
    assert slower and slower[-1].decode_s > 1.0


def test_on_a_full_link_fewer_rows_are_worth_their_bytes() -> None:
    """A side that sends drafts counts the time its distributions take on the link."""
    rows = {}
    for bandwidth in (None, 1e6, 100.0):
        hand = cloud(max_tokens=100, drafting=DraftLimits(width=3, rows=8, ahead=6), rtt=0.1, bandwidth=bandwidth)
        hand.say = lambda _: two(70, 71)
        hand.begin()
        forwards = [effect.segment for effect in hand.effects if isinstance(effect, Forward)]
        rows[bandwidth] = max(len(segment.tokens) for segment in forwards[1:])  # the first is the prompt
    assert rows[None] >= rows[1e6] > 2 * rows[100.0]


def test_a_node_that_is_unlikely_to_be_used_is_sent_once_a_target_goes_through_it() -> None:
    hand = cloud(front=False, rtt=0.5, drafting=TREE)
    hand.say = lambda _: two(50, 51, 0.943)
    hand.begin()
    assert (51,) in hand.rows, "a second guess was computed"

    def edges() -> set[int]:
        nodes = [unpack_nodes(message.nodes, VOCAB) for message in hand.sent if isinstance(message, Drafts)]
        pairs = [pair for each in nodes for pair in zip(each.parents, each.tokens, strict=True)]
        return {token for parent, token in pairs if parent >= 0}

    assert edges() == {50}
    known = len(hand.rows)
    (sent,) = says(hand.on(decided(0, 51)))
    assert isinstance(sent, Drafts) and unpack_nodes(sent.nodes, VOCAB).position == 1
    hand.answer()
    assert not any(row == (51,) for row in hand.rows[known:]), "and not computed again"


# ---- the side that decides ------------------------------------------------------------------------------------------
EQUAL = SpeedReport(0, 0, 0.04, 0.0)  # no forward takes time here, so the own speed is the one assumed at first


def opened(side: Side, **changes: object) -> Hand:
    """A side of an open answer with a peer far away."""
    hand = Hand(Aggregate, side, front=True, private=False, rtt=0.5, max_tokens=100, drafting=CHAIN, **changes)
    hand.begin()
    return hand


@pytest.mark.parametrize("reason", ["private", "wide", "tree", "accepted", "near", "unknown"])
def test_the_decision_stays_where_privacy_or_speed_wants_it(reason: str) -> None:
    hand = device(
        private=reason == "private",
        needs_dists=reason == "wide",
        rtt={"near": 0.0, "unknown": None}.get(reason, 0.5),
        max_tokens=100,
        drafting=TREE if reason == "tree" else CHAIN,
    )
    hand.begin()
    drafts = [65 if reason == "accepted" else 70]
    hand.on(Received(EQUAL), *heard(0, *drafts, log_weight=-5.0))
    hand.answer()
    assert not any(isinstance(message, Handover) for message in hand.sent)


@pytest.mark.parametrize("turn", [0, 2, 3, 2**31 - 1])
@pytest.mark.parametrize("side", SIDES)
def test_a_hand_over_that_is_not_the_peers_to_make_is_ignored(side: Side, turn: int) -> None:
    hand = opened(side)
    hand.on(handed(turn, 0), *heard(0, 65, log_weight=9.0))
    hand.answer()
    assert hand.tokens == ([65] if side == "device" else [])
    hand.on(decided(len(hand.tokens), 70))
    assert hand.tokens == ([65] if side == "device" else [70])


def test_no_peer_makes_a_cloud_decide_what_is_private() -> None:
    hand = cloud(private=True, aggregator="mixture")
    hand.begin()
    hand.on(handed(1, 0), *heard(0, 65))
    hand.answer()
    assert not hand.emitted


def test_a_hand_over_to_nowhere_is_a_peer_that_is_stuck() -> None:
    hand = opened("cloud")
    hand.on(handed(1, 10**6))
    assert passed_over_after(hand, lambda: hand.on(has(0, turn=1))) <= FIRST_S + 1.0
    hand.answer()
    assert len(hand.tokens) == 100


# ---- choice of the next rows ----------------------------------------------------------------------------------------
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
        assert planner.drafted(tree.head) == {"cloud": (65, 66)}
        planner.observe_target(tree.head, 66)
        tree.advance(66)
        tree.head.own_dist, tree.head.cached = dist, True
    (first,) = planner.select(tree.head, free, 1.0, FAR, alone=False)
    assert first.token == 66
