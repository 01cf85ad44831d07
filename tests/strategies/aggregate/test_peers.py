"""`aggregate` and its peer: useless and hostile messages, bounds on memory, and privacy."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from lab.simulation import Simulation
from paceline.core.aggregation.aggregators import AggregatorName
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.dist import Dist
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import SIDES, Branch, Event, Received, Retrieved, Side, Started
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import encode_head
from paceline.wire.messages import (
    DetailRequest,
    DistPayload,
    Drafts,
    EvidenceWeight,
    Handover,
    SessionMessage,
    SpeedReport,
    SyncState,
    Targets,
)
from paceline.wire.payloads import FOLLOWS, EncodedNodes, pack_nodes, unpack_nodes
from tests.strategies.cases import (
    CHAIN,
    EOS,
    PROMPT,
    SAMPLINGS,
    TREE,
    VOCAB,
    Hand,
    Manner,
    cloud,
    decided,
    device,
    drafted,
    handed,
    has,
    heard,
    job,
    point,
    says,
    two,
    weighed,
)
from tests.strategies.conformance.worlds import changing_speeds, harsh

EVERY_FRONT = pytest.mark.parametrize("front", SIDES)


def known_until(hand: Hand) -> int:
    """Number of targets in the state that the machine sends when nothing happens."""
    have = says(hand.wake_until(hand.now + 2.5))[-1]
    assert isinstance(have, SyncState)
    return have.targets


def nodes(
    parents: tuple[int, ...], tokens: tuple[int, ...], choices: tuple[int, ...] | None = None, first: int = 0
) -> bytes:
    return pack_nodes(EncodedNodes(0, 0, first, parents, tokens, choices))


# ---- messages that are worth nothing --------------------------------------------------------------------------------
OUTSIDE = Dist(np.array([65, VOCAB + 5], dtype=np.int32), np.array([0.5, 0.5]))
PAYLOAD = encode_head(point(65), precise=False)

USELESS_DRAFTS: dict[str, Event] = {
    "no nodes": Received(Drafts(0, 0, b"", [])),
    "nodes that are none": Received(Drafts(0, 0, b"\xff\xff\xff", [PAYLOAD])),
    "no distribution": Received(Drafts(0, 0, nodes((-1,), (0,)), [])),
    "more distributions than nodes": Received(Drafts(0, 0, nodes((-1,), (0,)), [PAYLOAD, PAYLOAD])),
    "half a distribution": Received(Drafts(0, 0, nodes((-1,), (0,)), [DistPayload(b"\x41", b"\x00")])),
    "a choice in place of a distribution": Received(Drafts(0, 0, nodes((-1,), (0,), (65,)), [])),
    "a distribution of ids outside the vocabulary": drafted(0, 65, dist=OUTSIDE),
    "an edge outside the vocabulary": Received(Drafts(0, 0, nodes((-1, 0), (0, VOCAB)), [PAYLOAD, PAYLOAD])),
    "another epoch": drafted(0, 65, epoch=3),
    "a prefix that is not decided": drafted(5, 65),
    "an unknown parent": Received(Drafts(0, 0, pack_nodes(EncodedNodes(None, 0, 9, (7,), (65,), None)), [PAYLOAD])),
    "a choice that was never sent": Received(
        Drafts(0, 0, pack_nodes(EncodedNodes(None, 0, 9, (0,), (FOLLOWS,), (65,))), [])
    ),
}
USELESS_TARGETS: dict[str, Event] = {
    "outside the vocabulary": decided(0, 65, VOCAB),
    "more than were asked for": decided(0, *[65] * 9),
    "beyond what was asked for": decided(8, 65),
    "none": decided(0),
    "another epoch": decided(0, 70, epoch=1),
}


@pytest.mark.parametrize("useless", USELESS_DRAFTS.values(), ids=USELESS_DRAFTS.keys())
def test_a_useless_draft_is_as_good_as_lost(useless: Event) -> None:
    hand = device()
    hand.begin()
    hand.on(weighed(), useless)
    assert not hand.emitted and known_until(hand) == 0
    hand.on(drafted(0, 65))
    assert hand.tokens == [65]


def test_an_empty_distribution_is_asked_for_in_more_detail() -> None:
    """Every probability may have been too small for 16 bits."""
    hand = device()
    hand.begin()
    (asked,) = says(hand.on(weighed(), Received(Drafts(0, 0, nodes((-1,), (0,)), [DistPayload(b"", b"")]))))
    assert isinstance(asked, DetailRequest) and (asked.node, asked.level) == (0, 1)
    packed = pack_nodes(EncodedNodes(0, 1, 0, (-1,), (0,), None))
    hand.on(Received(Drafts(0, 0, packed, [encode_head(point(65), precise=True)])))
    assert hand.tokens == [65]


@pytest.mark.parametrize("useless", USELESS_TARGETS.values(), ids=USELESS_TARGETS.keys())
def test_useless_targets_are_as_good_as_lost(useless: Event) -> None:
    hand = cloud()
    hand.begin()
    hand.on(useless)
    assert not hand.emitted and known_until(hand) == 0
    hand.on(decided(0, 65))
    assert hand.tokens == [65]


@pytest.mark.parametrize("log_weight", [1e308, -1e308, 700.0, -700.0])
def test_no_weight_is_too_large_to_decide_with(log_weight: float) -> None:
    hand = device()
    hand.say = lambda _: point(66)
    hand.begin()
    hand.on(*heard(0, 65, log_weight=log_weight))
    assert hand.tokens[:1] == [65 if log_weight > 0 else 66]


# ---- what is held ---------------------------------------------------------------------------------------------------
def test_a_distribution_for_every_possible_prefix_makes_no_side_compute_for_ever() -> None:
    """`Hand` asserts a limit of 5,000 rows."""
    hand = device(max_tokens=1000)
    chance = random.Random(1)
    hand.begin()
    hand.on(weighed())
    for start in range(0, 3000, 30):
        parents = (-1, *(start + chance.randrange(place) for place in range(1, 30)))
        tokens = (0, *(chance.randrange(256) for _ in range(29)))
        hand.on(Received(Drafts(0, 0, nodes(parents, tokens, first=start), [PAYLOAD] * 30)))
        hand.answer()
    assert len(hand.rows) < 2000


# ---- whose documents ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("draft", "log_weight", "token", "lane"),
    [
        (66, 5.0, 66, "cloud"),
        (66, -5.0, 65, "device"),
        (65, 5.0, 65, None),  # both would have chosen it
        (66, None, 65, "device"),  # the cloud found nothing
    ],
)
def test_a_device_that_faces_the_client_names_the_side_and_tells_nobody(
    draft: int, log_weight: float | None, token: int, lane: Side | None
) -> None:
    hand = device(max_tokens=1)
    hand.begin()
    hand.on(*heard(0, draft, log_weight=log_weight))
    assert [(emit.token, emit.lane) for emit in hand.emitted] == [(token, lane)]
    *_, targets = hand.sent
    assert isinstance(targets, Targets) and (len(targets.tokens), targets.lanes) == (1, b"")


def test_where_nobody_found_a_document_no_side_is_named() -> None:
    hand = device(max_tokens=1)
    hand.begin(score=None)
    hand.on(*heard(0, 65, log_weight=None))
    assert [emit.lane for emit in hand.emitted] == [None]


def test_a_cloud_that_faces_the_client_names_the_side_it_received() -> None:
    hand = cloud()
    hand.begin()
    hand.on(decided(0, 65, 66, 67, 68, lanes=b"\x00\x01\x02\x07"))
    assert [emit.lane for emit in hand.emitted] == [None, "cloud", "device", None]


# ---- what a peer learns ---------------------------------------------------------------------------------------------
def may_send(message: SessionMessage, rule: AggregatorName, front: Side) -> bool:
    """A device with private documents may send this message. front: as whose client asks."""
    if isinstance(message, Drafts):
        return not message.dists and unpack_nodes(message.nodes, VOCAB).scores is None and front == "device"
    return rule == "coin" or not isinstance(message, EvidenceWeight | SpeedReport | Handover)


@EVERY_FRONT
@pytest.mark.parametrize("rule", ["mixture", "paper", "coin"])
def test_no_peer_gets_out_of_a_device_what_is_private(front: Side, rule: AggregatorName) -> None:
    """Whatever the peer requests, and even if it claims to decide."""
    for seed in range(2):
        chance = random.Random(seed)
        hand = device(front=front == "device", private=True, aggregator=rule, rtt=0.5, max_tokens=100, drafting=TREE)
        hand.begin()
        for _ in range(60):
            known = known_until(hand) if chance.random() < 0.2 else chance.randrange(4)
            hand.on(
                chance.choice(
                    [
                        Received(DetailRequest(0, 0, chance.randrange(8), chance.choice((1, 2)))),
                        handed(chance.choice((1, 2)), known),
                        has(known, turn=chance.choice((0, 1)), waits=True),
                        Received(SpeedReport(0, 0, 3.0, 0.0)),
                        weighed(3.0),
                        drafted(known, 65, 65),
                        decided(known, 65),
                    ]
                )
            )
            hand.answer()
        assert all(may_send(message, rule, front) for message in hand.sent)


DOCUMENT = (*PROMPT, 40, 50, 51, 52, 53, 7, 8)


def tree(hand: Hand) -> list[tuple[tuple[int, ...], int]]:
    """Nodes sent with a choice: each one's tokens from the anchor of its message on, and the choice there."""
    paths: dict[int, tuple[int, ...]] = {}
    chosen: dict[int, int] = {}
    sent = []
    for message in hand.sent:
        if isinstance(message, Drafts):
            encoded = unpack_nodes(message.nodes, VOCAB)
            assert encoded.choices is not None
            for place, (parent, token, choice) in enumerate(
                zip(encoded.parents, encoded.tokens, encoded.choices, strict=True)
            ):
                edge = () if parent < 0 else (chosen[parent] if token == FOLLOWS else token,)
                number = encoded.first + place
                paths[number], chosen[number] = (*paths.get(parent, ()), *edge), choice
                sent.append((paths[number], choice))
    return sent


def following(prompt: tuple[int, ...], say: Callable[[int], int], table: LookupTable) -> Hand:
    """A device with private documents that lets the cloud decide. say: the token that follows a token."""
    machine = partial(Aggregate, keep_at="cloud")
    hand = Hand(machine, "device", front=True, private=True, aggregator="coin", rtt=0.5, max_tokens=100, table=table)
    hand.say = lambda path: point(say(path[-1]) if path else 90)
    hand.on(Started(0.0), Retrieved((Branch(prompt, 0.0),)), weighed(9.0))
    hand.answer()
    return hand


@pytest.mark.parametrize("source", ["document", "earlier answer"])
def test_an_n_gram_draft_is_not_sent_before_it_is_a_target(source: str) -> None:
    """It would reveal private text, word by word, and a second choice at one position."""
    table = LookupTable(VOCAB)
    for before, after in pairwise(DOCUMENT):
        if source == "earlier answer":
            table.record(before, [after], [0.9])
    prompt = DOCUMENT if source == "document" else PROMPT
    hand = following(prompt, lambda _: 90, table)
    known = len(hand.rows)
    hand.on(decided(0, 40))
    hand.answer()
    drafts = [row[len(prompt) - len(PROMPT) :] for row in hand.rows[known:]]
    assert (40, 50) in drafts and (40, 50, 51, 52) in drafts, "nothing was drafted"
    assert all(set(path) <= {90} for path, _ in tree(hand))
    known = len(hand.rows)
    sent = says(hand.on(decided(1, 50)))
    assert any(isinstance(message, Drafts) for message in sent), "a row that was computed is sent at once"
    hand.on(has(2, turn=0, waits=True), decided(2, 51), handed(1, 3))
    hand.answer()
    assert not any(row[-1] in (50, 51) for row in hand.rows[known:]), "and not computed again"
    assert all(set(path) <= {90} for path, _ in tree(hand))


def test_an_n_gram_draft_that_the_model_shares_is_sent_with_its_choice() -> None:
    """Several levels in one forward."""
    after = dict(pairwise((40, 50, 51, 52, 53, 40)))
    hand = following(DOCUMENT, lambda token: after.get(token, 90), LookupTable(VOCAB))
    hand.on(decided(0, 40))
    hand.answer_one()
    assert ((50, 51, 52), 53) in tree(hand)


def expecting(say: Callable[[tuple[int, ...]], Dist], **changes: object) -> Hand:
    """A device with private documents that decides, and draws what its own model would say beside the cloud."""
    hand = device(front=True, private=True, rtt=0.5, max_tokens=100, drafting=TREE, **changes)
    hand.say = say
    hand.begin()
    return hand


def test_a_device_that_decides_shows_the_one_path_it_expects() -> None:
    """Not its second guesses, which it computes as well, and no distribution."""
    hand = expecting(lambda path: two(90 + len(path), 40))
    hand.on(weighed())
    hand.answer()
    assert (40,) in hand.rows, "a second guess was computed"
    shown = tree(hand)
    assert shown[0] == ((), 90) and ((90, 91, 92), 93) in shown
    assert len({path for path, _ in shown}) == len(shown) and all(40 not in path for path, _ in shown)
    assert not any(message.dists for message in hand.sent if isinstance(message, Drafts))


def test_a_cloud_computes_what_the_device_expects_beside_its_own_drafts() -> None:
    hand = cloud(front=False, private=True, rtt=0.5, max_tokens=100, drafting=TREE)
    hand.say = lambda _: two(50, 51)
    hand.begin()
    encoded = EncodedNodes(0, 0, 0, (-1, 0, 1), (0, 60, 61), (60, 61, 62))
    hand.on(Received(Drafts(0, 0, pack_nodes(encoded))))
    hand.answer()
    assert {(60,), (60, 61), (60, 61, 62), (50,)} <= set(hand.rows)
    assert not hand.tokens, "a choice is no target"


def test_choices_in_place_of_distributions_are_no_answer_to_a_device_that_decides() -> None:
    hand = expecting(lambda _: point(90))
    hand.on(weighed(), Received(Drafts(0, 0, pack_nodes(EncodedNodes(0, 0, 0, (-1,), (0,), (60,))))))
    hand.answer()
    assert not hand.tokens


@EVERY_FRONT
@pytest.mark.parametrize("rule", ["mixture", "paper", "coin"])
def test_a_device_sends_nothing_that_tells_of_its_private_documents(front: Side, rule: AggregatorName) -> None:
    """Lanes are sent only to a cloud that must show them to its client."""
    lanes: set[int] = set()
    targets = 0
    for seed in range(4):
        chance = random.Random(f"overheard {seed}")

        def flap(world: Simulation, chance: random.Random = chance) -> None:
            changing_speeds(world)
            if chance.random() < 0.01:
                world.cut()
            elif chance.random() < 0.05:
                world.mend()

        this = job(STRATEGIES["aggregate"], front, SAMPLINGS["sampled"], manner=Manner(rule), max_tokens=24)
        world = harsh(seed, reorders=seed % 2 == 1).world(this, seed)
        world.run(flap)
        messages = [sent.message for sent in world.messages if sent.sender == "device"]
        said = [message for message in messages if isinstance(message, SessionMessage)]
        for message in said:
            assert isinstance(
                message, Targets | SyncState | DetailRequest | Drafts | EvidenceWeight | SpeedReport | Handover
            )
            if isinstance(message, Drafts | EvidenceWeight | SpeedReport | Handover):
                assert may_send(message, rule, front), message
            if isinstance(message, Targets):
                targets += len(message.tokens)
                lanes.update(message.lanes)
    assert targets > 50
    assert lanes <= (set() if front == "device" else {0, 1, 2})
    assert front == "device" or len(lanes) > 1


def test_nothing_is_kept_behind_the_end_of_the_text() -> None:
    """A device that leaves its answer open after the end may send every target again, with whatever it likes."""
    hand = cloud(front=False, max_tokens=100_000, drafting=CHAIN)
    hand.begin()
    hand.on(decided(0, 65, 65, next(iter(EOS))))
    hand.on(*(decided(start, *[65] * 64) for start in range(4)))
    assert isinstance(hand.machine, Aggregate) and hand.machine._follower._early.pop(100_000) is None


def test_targets_that_follow_at_once_need_not_wait() -> None:
    hand = cloud(max_tokens=100_000, drafting=CHAIN)
    hand.on(Started(0.0), decided(0, *[65] * 3_000))
    assert known_until(hand) == 3_000
