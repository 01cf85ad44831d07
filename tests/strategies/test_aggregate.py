"""`aggregate` one event at a time: what it waits for, what it gives up on, what a peer cannot make it do or learn."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from paceline.core.dist import Dist
from paceline.runtime.world import Host, World
from paceline.strategies.aggregate import MAX_DRAFT_AHEAD, MAX_EARLY, PATIENCE, STALL, Aggregate, deciding_side
from paceline.strategies.machine import (
    SIDES,
    Cancelled,
    Drop,
    Event,
    Finish,
    Forward,
    LinkBack,
    LinkLost,
    Open,
    Received,
    Send,
    Side,
    Started,
    Strategy,
    other,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DistPayload, DraftTokens, Have, Message, Targets
from tests.strategies import oracle
from tests.strategies.cases import (
    BRANCHES,
    EOS,
    MAX_TOKENS,
    PROMPT,
    SAMPLINGS,
    VOCAB,
    Hand,
    decided,
    drafted,
    engines,
    found,
    job,
    point,
)
from tests.strategies.test_conformance import harsh

EVERY_FRONT = pytest.mark.parametrize("front", SIDES)


def device(*, front: bool = True, **changes: object) -> Hand:
    return Hand(Aggregate, "device", front=front, **changes)


def cloud(*, front: bool = True, **changes: object) -> Hand:
    return Hand(Aggregate, "cloud", front=front, **changes)


def known_until(hand: Hand) -> int:
    """Targets the machine has, as it says when nothing happens."""
    says = [effect.message for _ in range(2) for effect in hand.wake() if isinstance(effect, Send)]
    have = says[-1]
    assert isinstance(have, Have)
    return have.targets


# ---- waiting --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("front", [True, False])
def test_the_side_that_decides_waits_for_its_own_documents(front: bool) -> None:
    hand = device(front=front)
    hand.on(Started(0.0), drafted(0, 65))
    assert not hand.sent and not hand.emitted
    hand.on(found())
    assert not hand.sent and not hand.emitted  # nor before its engine has read them
    hand.say = lambda _: point(66)
    hand.answer()
    target = hand.sent[0]
    assert isinstance(target, Targets) and target.tokens == [65]  # of equals the lower id


def test_it_does_not_wait_for_a_peer_that_found_nothing() -> None:
    hand = device()
    hand.begin(score=1.0)
    assert not hand.emitted  # whether the peer found something is not known
    hand.on(drafted(0, 66, log_weight=None))
    hand.answer()
    assert [emit.token for emit in hand.emitted] == [65] * 8


def test_the_side_that_follows_takes_targets_before_it_has_searched() -> None:
    hand = cloud()
    hand.on(Started(0.0), decided(0, 65, 66))
    assert [emit.token for emit in hand.emitted] == [65, 66]
    (prefill,) = [effect for effect in hand.on(found()) if isinstance(effect, Forward)]
    assert prefill.segment.tokens == (*PROMPT, 65, 66)
    hand.answer()
    (more,) = [effect for effect in hand.on(decided(2, 70, epoch=1)) if isinstance(effect, Forward)]
    assert (more.segment.start, more.segment.tokens) == (len(PROMPT) + 2, (70,))


def test_a_link_lost_and_back_before_the_start_opens_one_session() -> None:
    hand = device()
    hand.on(LinkLost(), LinkBack(), Started(0.0))
    hand.on(found())
    assert [effect.targets for effect in hand.effects if isinstance(effect, Open)] == [()]


# ---- a peer that is of no use ---------------------------------------------------------------------------------------
def dropped_after(hand: Hand, between: Callable[[], object]) -> int:
    """Wakes until the machine gives its peer up."""
    for wakes in range(1, 2 * STALL):
        if any(isinstance(effect, Drop) for effect in hand.wake()):
            return wakes
        between()
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lives", [False, True], ids=["silent", "stuck"])
def test_a_peer_that_brings_nothing_is_given_up_and_the_answer_goes_on(side: Side, lives: bool) -> None:
    hand = Hand(Aggregate, side, front=True)
    hand.begin()

    def between() -> None:
        if lives:
            hand.on(Received(Have(0, 0, 0, 0)))

    wakes = dropped_after(hand, between)
    assert wakes in ((STALL, STALL + 1) if lives else (PATIENCE, PATIENCE + 1))
    assert not hand.emitted
    hand.on(LinkLost())
    hand.answer()
    assert [emit.token for emit in hand.emitted] == [65] * 8
    assert hand.finish.reason == "length" and hand.finish.stats["alone"] == 8


def test_a_slow_search_or_engine_of_its_own_is_not_held_against_the_peer() -> None:
    hand = device()
    hand.on(Started(0.0))
    for _ in range(2 * STALL):
        hand.on(Received(Have(0, 0, 0, 0)))
        assert not any(isinstance(effect, Drop) for effect in hand.wake())
    hand.on(found())  # and its engine has not answered yet
    for _ in range(2 * STALL):
        hand.on(Received(Have(0, 0, 0, 0)))
        assert not any(isinstance(effect, Drop) for effect in hand.wake())


@pytest.mark.parametrize("lost", [False, True], ids=["together", "alone"])
def test_after_finish_comes_nothing(lost: bool) -> None:
    hand = device(max_tokens=2)
    hand.begin()
    if lost:
        dropped_after(hand, lambda: None)
        hand.on(LinkLost())
    else:
        hand.on(drafted(0, 65, 65))
    hand.answer()
    assert hand.finish.reason == "length"
    assert sum(isinstance(effect, Finish) for effect in hand.effects) == 1
    assert not hand.on(LinkLost(), LinkBack(), found(), drafted(2, 65), decided(2, 65), Started(9.0), Cancelled())
    assert not hand.wake()


@EVERY_FRONT
def test_a_peer_whose_context_ends_leaves_and_the_front_goes_on_alone(front: Side) -> None:
    room, sampling = 5, SAMPLINGS["sampled"]
    expected = oracle.mixed(engines(), BRANCHES, sampling, MAX_TOKENS, EOS)
    this = job(STRATEGIES["aggregate"], front, sampling, room={other(front): room})
    world = World(this, engines())
    answer = world.run()
    peer: Host = world.hosts[other(front)]
    assert peer.finished is not None and peer.finished.reason == "length"
    assert answer.finished is not None and answer.finished.reason == "length"
    together = MAX_TOKENS - int(answer.finished.stats["alone"])
    assert room <= together <= room + MAX_DRAFT_AHEAD
    assert answer.tokens[:together] == expected[:together]
    assert answer.tokens == oracle.continued_alone(
        engines()[front], BRANCHES[front], expected[:together], sampling, MAX_TOKENS, EOS
    )


@pytest.mark.parametrize("late", [False, True], ids=["held", "on its way"])
def test_drafts_from_before_a_loss_count_no_more_when_the_peer_is_back(late: bool) -> None:
    hand = device()
    old = drafted(0, 65, 66, 66, log_weight=5.0)
    hand.on(Started(0.0), *([] if late else [old]), LinkLost(), LinkBack())
    (again,) = [effect for effect in hand.effects[1:] if isinstance(effect, Open) and effect.epoch > 0]
    hand.on(*([old] if late else []), drafted(0, 65, epoch=again.epoch, log_weight=5.0), found())
    hand.answer()
    assert [emit.token for emit in hand.emitted] == [65]


@pytest.mark.parametrize("late", [False, True], ids=["held", "on its way"])
def test_targets_from_before_a_loss_count_no_more_when_the_peer_is_back(late: bool) -> None:
    hand = cloud()
    old = decided(1, 70, 70)
    hand.on(Started(0.0), *([] if late else [old]), LinkLost(), LinkBack())
    (again,) = [effect for effect in hand.effects[1:] if isinstance(effect, Open) and effect.epoch > 0]
    hand.on(*([old] if late else []), decided(0, 65, epoch=again.epoch))
    assert [emit.token for emit in hand.emitted] == [65]


# ---- messages that are worth nothing --------------------------------------------------------------------------------
OUTSIDE = Dist(np.array([65, VOCAB + 5], dtype=np.int32), np.array([0.5, 0.5]))

USELESS_DRAFTS: dict[str, Event] = {
    "an empty distribution": Received(DraftTokens(0, 0, 0, [65], [DistPayload(b"", b"")], 0.0)),
    "an empty one, with all the weight": Received(DraftTokens(0, 0, 0, [65], [DistPayload(b"", b"")], 1e300)),
    "no distribution": Received(DraftTokens(0, 0, 0, [65], [], 0.0)),
    "half a distribution": Received(DraftTokens(0, 0, 0, [65], [DistPayload(b"\x41", b"\x00")], 0.0)),
    "ids outside the vocabulary": drafted(0, 65, law=OUTSIDE),
    "another epoch": drafted(0, 65, epoch=3),
    "far ahead": drafted(MAX_DRAFT_AHEAD + 1, 65),
}
USELESS_TARGETS: dict[str, Event] = {
    "outside the vocabulary": decided(0, 65, VOCAB),
    "too few lanes": decided(0, 65, 65, lanes=b"\x00"),
    "too many lanes": decided(0, 65, lanes=b"\x00\x00"),
    "more than were asked for": decided(0, *[65] * 9),
    "beyond what was asked for": decided(8, 65),
    "none": decided(0),
}


@pytest.mark.parametrize("useless", USELESS_DRAFTS.values(), ids=USELESS_DRAFTS.keys())
def test_a_useless_draft_is_as_good_as_lost(useless: Event) -> None:
    hand = device()
    hand.begin()
    hand.on(useless)
    assert not hand.emitted and known_until(hand) == 0
    hand.on(drafted(0, 65))
    assert [emit.token for emit in hand.emitted] == [65]


@pytest.mark.parametrize("useless", USELESS_TARGETS.values(), ids=USELESS_TARGETS.keys())
def test_useless_targets_are_as_good_as_lost(useless: Event) -> None:
    hand = cloud()
    hand.begin()
    hand.on(useless)
    assert not hand.emitted and known_until(hand) == 0
    hand.on(decided(0, 65))
    assert [emit.token for emit in hand.emitted] == [65]


def test_what_waits_for_earlier_targets_is_bounded() -> None:
    many = cloud(max_tokens=100_000)
    many.begin()
    many.on(*(decided(start, 65) for start in range(1, 10 * MAX_EARLY)), decided(0, 65))
    assert 1 < known_until(many) <= MAX_EARLY + 1
    long = cloud(max_tokens=100_000)
    long.begin()
    long.on(decided(1, *[65] * 50_000), decided(0, 65))
    assert known_until(long) == 1  # kept nothing, will ask again
    long.on(decided(1, *[65] * 50_000))
    assert known_until(long) == 50_001  # what follows at once need not wait


def test_drafts_held_for_later_are_bounded() -> None:
    hand = device(max_tokens=1000)
    hand.on(Started(0.0), drafted(0, *[65] * 256))
    (says,) = [effect.message for effect in hand.wake() if isinstance(effect, Send)]
    assert isinstance(says, Have) and 1 <= says.drafts <= MAX_DRAFT_AHEAD + 1


# ---- drafting -------------------------------------------------------------------------------------------------------
def test_drafts_stay_within_their_bound() -> None:
    hand = cloud(max_tokens=100)
    hand.begin()
    positions = [message.start for message in hand.sent if isinstance(message, DraftTokens)]
    assert positions == list(range(MAX_DRAFT_AHEAD))
    hand.on(decided(0, 65))
    hand.answer()
    hand.on(decided(1, 70, epoch=1))  # not what was drafted: all beyond is void
    hand.answer()
    fresh = [(m.epoch, m.start) for m in hand.sent[len(positions) :] if isinstance(m, DraftTokens)]
    assert fresh == [(0, MAX_DRAFT_AHEAD), *((1, 2 + ahead) for ahead in range(MAX_DRAFT_AHEAD))]


def test_the_side_that_decides_computes_no_further_ahead_either() -> None:
    hand = device(max_tokens=100)
    hand.begin()
    rows = max(f.segment.start + len(f.segment.tokens) for f in hand.effects if isinstance(f, Forward))
    assert rows == len(PROMPT) + MAX_DRAFT_AHEAD


@pytest.mark.parametrize("side", SIDES)
def test_accepted_and_drafted_are_what_happened(side: Side) -> None:
    """Two drafts that stand, one that does not, and one more that does."""
    hand = Hand(Aggregate, side, front=True, max_tokens=4)
    hand.begin()
    if side == "device":
        hand.on(drafted(0, 65, 65, 70, 65, log_weight=-3.0))
        hand.answer()
        assert len(hand.emitted) == 3  # the last was drafted after a token that did not stand
        hand.on(drafted(3, 65, epoch=1, log_weight=-3.0))
    else:
        hand.on(decided(0, 65, 65), decided(2, 70, epoch=1))
        hand.answer()
        hand.on(decided(3, 65, epoch=1))
    assert hand.finish.stats == {"drafted": 4, "accepted": 3, "alone": 0}


# ---- whose documents, and what the peer learns ----------------------------------------------------------------------
def spread(**probs: float) -> Dist:
    ids = sorted(int(name[1:]) for name in probs)
    values = np.array([probs[f"t{token}"] for token in ids])
    return Dist(np.array(ids, dtype=np.int32), values, 1.0 - float(values.sum()))


@pytest.mark.parametrize(
    ("on_cloud", "on_device", "expected"),
    [
        (0.8, 0.1, "cloud"),
        (0.1, 0.8, "device"),
        (0.4, 0.2, "cloud"),  # exactly twice
        (0.39, 0.2, None),
        (0.2, 0.39, None),
        (0.3, 0.3, None),
        (0.01, 0.0, "cloud"),
    ],
)
def test_a_token_is_one_sides_when_that_side_thought_it_twice_as_likely(
    on_cloud: float, on_device: float, expected: Side | None
) -> None:
    laws: dict[Side, Dist] = {"cloud": spread(t7=on_cloud, t9=0.1), "device": spread(t7=on_device, t9=0.1)}
    assert deciding_side(7, laws) == expected


def test_a_side_alone_in_the_mixture_decides_what_it_decides() -> None:
    assert deciding_side(7, {"device": spread(t7=0.1)}) == "device"


@pytest.mark.parametrize(
    ("draft", "log_weight", "token", "lane"),
    [
        (66, 5.0, 66, "cloud"),
        (66, -5.0, 65, "device"),
        (65, 5.0, 65, None),  # both would have said it
        (66, None, 65, "device"),  # the cloud found nothing
    ],
)
def test_a_device_that_faces_the_client_names_the_side_and_tells_nobody(
    draft: int, log_weight: float | None, token: int, lane: Side | None
) -> None:
    hand = device(max_tokens=1)
    hand.begin()
    hand.on(drafted(0, draft, log_weight=log_weight))
    assert [(emit.token, emit.lane) for emit in hand.emitted] == [(token, lane)]
    (targets,) = hand.sent
    assert isinstance(targets, Targets) and (targets.tokens, targets.lanes) == ([token], b"\x00")


def test_where_nobody_found_a_document_no_side_is_named() -> None:
    hand = device(max_tokens=1)
    hand.begin(score=None)
    hand.on(drafted(0, 66, log_weight=None))
    assert [emit.lane for emit in hand.emitted] == [None]


def test_a_cloud_that_faces_the_client_names_the_side_it_was_told() -> None:
    hand = cloud()
    hand.begin()
    hand.on(decided(0, 65, 66, 67, 68, lanes=b"\x00\x01\x02\x07"))
    assert [emit.lane for emit in hand.emitted] == [None, "cloud", "device", None]


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("score", [0.5, None], ids=["document", "none"])
def test_who_writes_alone_names_itself_where_it_reads_a_document(
    side: Side, score: float | None, strategy: Strategy
) -> None:
    hand = Hand(strategy.machine, side, front=True, linked=False)
    hand.begin(score)
    assert {emit.lane for emit in hand.emitted} == {None if score is None else side}


class Overheard(World):
    """Keeps what each side sends."""

    def send(self, sender: Host, message: Message) -> None:
        self.overheard = [*getattr(self, "overheard", []), (sender.side, message)]
        super().send(sender, message)


@EVERY_FRONT
def test_a_device_sends_targets_and_nothing_that_tells_of_its_documents(front: Side) -> None:
    """Never drafts or distributions; lanes only to a cloud that must show them to its client."""
    lanes: set[int] = set()
    targets = 0
    for seed in range(12):
        weather, chance = harsh(seed), random.Random(f"overheard {seed}")

        def flap(world: World, chance: random.Random = chance) -> None:
            if chance.random() < 0.01:
                world.cut()
            elif chance.random() < 0.05:
                world.mend()

        this = job(STRATEGIES["aggregate"], front, SAMPLINGS["filtered"])
        world = Overheard(
            this, engines(), seed=seed, network=weather.network, decode=weather.decode, search=weather.search
        )
        world.run(flap)
        said = [message for side, message in world.overheard if side == "device"]
        assert not any(isinstance(message, DraftTokens) for message in said)
        for message in said:
            if isinstance(message, Targets):
                targets += len(message.tokens)
                lanes.update(message.lanes)
    assert targets > 100
    assert lanes == ({0} if front == "device" else {0, 1, 2})
