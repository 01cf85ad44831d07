"""`aggregate` one event at a time: what it waits for, what it computes, and when the decision changes sides.

What a useless or hostile peer can make it do, and what a peer learns, is in `test_peers`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from lab.simulation import SimulatedSession, Simulation
from paceline.core.aggregation.aggregators import AggregatorName
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import (
    SIDES,
    Effect,
    Forward,
    Received,
    Side,
    Started,
    other,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DetailRequest, DraftLimits, Drafts, SpeedReport, Targets
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
    heard,
    job,
    point,
    says,
    two,
    weighed,
    without_documents,
)
from tests.strategies.conformance.laws import reference, settled
from tests.strategies.conformance.worlds import harsh

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
    """As if it alone had one, in any network."""
    strategy, sampling = STRATEGIES["aggregate"], settled(manner, SAMPLINGS["sampled"])
    empty = {side: without_documents(BRANCHES[side]) for side in SIDES}
    weighs = empty | {writer: (replace(empty[writer][0], score=0.0),)}
    expected = reference(strategy, front, sampling, manner, weighs)
    this = replace(manner, options=(*manner.options, ("writer", writer)))
    for seed in range(2):
        world = harsh(seed, reorders=True).world(job(strategy, front, sampling, branches=empty, manner=this), seed)
        assert world.run().tokens == expected
    if manner.rule == "mixture":
        assert expected == oracle.continued_alone(engines()[writer], empty[writer], (), sampling, MAX_TOKENS, EOS)


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
    hand.say = lambda _: two(50, 51, 0.93)
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
