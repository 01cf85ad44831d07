"""The machines of `draft_verify`, their chain of drafts, its verifiers and its pace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.configs import a_config, changed
from lab.simulation import Network, SimulatedRequest, Simulation
from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.offloading import EnergyQueue, OffloadStats
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.verification import VerifierName
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.errors import RequestError
from paceline.strategies.base import (
    Branch,
    ClosePeer,
    Effect,
    Emit,
    Finish,
    Forward,
    LinkLost,
    MachineConfig,
    Received,
    Retrieved,
    RoutingContext,
    Scored,
    Send,
    Side,
    Started,
    Wish,
)
from paceline.strategies.decoding.prefix_tree import PrefixTree
from paceline.strategies.draft_verify.drafting import Chain, Drafted
from paceline.strategies.draft_verify.machine import Drafter
from paceline.strategies.draft_verify.pace import FIRST_EXAMINED, PROBE_STEPS, Pace
from paceline.strategies.draft_verify.target_writer import MAX_ROWS, PeerChain, TargetWriter
from paceline.strategies.draft_verify.verifiers import (
    Agreement,
    Draft,
    Rejection,
    Truncation,
    Verifier,
    check,
    options_of,
    verifier_of,
)
from paceline.strategies.joint import MAX_EARLY, MAX_EARLY_BYTES, EarlyTargets
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import encode
from paceline.wire.messages import TOKEN_BYTES, DistPayload, SessionMessage, SyncState, Targets
from paceline.wire.payloads import encode_places, encode_prob
from paceline.wire.verify_messages import MAX_CHAIN, DraftChain, Rejected, VerifyOptions
from tests.requests import routed
from tests.strategies.cases import EOS, PROMPT, VOCAB, Manner, Only, engines, job, point

FOUND = Retrieved((Branch(PROMPT, None),), None)


def config(side: str, **fields: object) -> MachineConfig:
    given = {"joined": True, "needs_dists": True, "options": VerifyOptions(rescoring=False)} | fields
    return a_config(side, side == "device", SamplingParams(temperature=0.0), 400, EOS, VOCAB, **given)  # type: ignore[arg-type]


def begun(**fields: object) -> tuple[TargetWriter, Forward]:
    """A cloud, and its prefill, which has not been answered."""
    cloud = TargetWriter(config("cloud", **fields))
    cloud.on(Started(0.0))
    (prefill,) = cloud.on(FOUND)
    assert isinstance(prefill, Forward)
    return cloud, prefill


def verdict(start: int, *tokens: int) -> Received:
    return Received(Targets(0, 0, start, list(tokens), b""))


def emitted(effects: Sequence[Effect]) -> list[int]:
    return [effect.token for effect in effects if isinstance(effect, Emit)]


def test_a_cloud_that_breaks_the_form_is_dropped_at_its_first_such_token_and_nothing_of_it_is_written() -> None:
    device = Drafter(config("device", mask=Only(65)))
    device.on(Started(0.0))
    device.on(FOUND)
    effects = device.on(verdict(0, 65, 66, 65))
    assert emitted(effects) == [65] and any(isinstance(effect, ClosePeer) and effect.fault for effect in effects)
    assert emitted(device.on(verdict(1, 66, 66))) == []
    assert 66 not in emitted(device.on(LinkLost()))


def test_a_device_that_sends_many_drafts_gets_no_wider_forward() -> None:
    cloud, prefill = begun()
    cloud.on(Received(DraftChain(0, 0, 0, 0, places([65] * MAX_CHAIN))))
    effects = scored(cloud, prefill)
    (forward,) = [effect for effect in effects if isinstance(effect, Forward)]
    assert len(forward.segment.tokens) == 1 + MAX_ROWS


def scored(machine: TargetWriter, forward: Forward) -> Sequence[Effect]:
    return machine.on(Scored(forward.ticket, (point(65),), 0.1))


def test_a_cloud_that_waits_for_drafts_decodes_on_once_there_are_none_until_some_come() -> None:
    cloud, prefill = begun(options=VerifyOptions(rescoring=False, waits=True))
    assert forwards(scored(cloud, prefill)) == [], "it waits"
    (first,) = forwards(cloud.on(Received(DraftChain(0, 0, 1, 0, b""))))
    (second,) = forwards(scored(cloud, first))
    (third,) = forwards(scored(cloud, second))
    assert forwards(cloud.on(Received(DraftChain(0, 0, 2, 0, places([66]))))) == []
    assert forwards(scored(cloud, third)) == [], "drafts of another text: it waits for those that follow its own"
    assert len(forwards(cloud.on(Received(DraftChain(0, 0, 4, 0, places([65])))))) == 1


def places(tokens: Sequence[int]) -> bytes:
    return encode_places([(token, None) for token in tokens])


def test_a_second_guess_is_verified_beside_its_draft_and_brings_the_token_behind_it() -> None:
    cloud, prefill = begun()
    cloud.on(Received(DraftChain(0, 0, 0, 0, encode_places([(65, None), (66, 67), (68, 256)]))))
    (step,) = forwards(scored(cloud, prefill))
    assert (step.segment.tokens, step.segment.parents) == ((65, 66, 68, 67), (-1, 0, 1, 0)), "an end is no row"
    effects = cloud.on(Scored(step.ticket, (point(67), point(68), point(70), point(71)), 0.2))
    (verdict,) = (effect.message for effect in effects if isinstance(effect, Send))
    assert isinstance(verdict, Targets) and verdict.tokens == [67, 71]


def forwards(effects: Sequence[Effect]) -> list[Forward]:
    return [effect for effect in effects if isinstance(effect, Forward)]


def test_a_device_that_drafts_nothing_says_so_once() -> None:
    device = Drafter(config("device", options=VerifyOptions(rescoring=False, waits=True, most=0)))
    device.on(Started(0.0))
    prefill = [effect for effect in device.on(FOUND) if isinstance(effect, Forward)]
    device.on(Scored(prefill[0].ticket, (point(65),), 0.1))
    said = [device.on(verdict(place, 65)) for place in range(3)]
    chains = [effect.message for effects in said for effect in effects if isinstance(effect, Send)]
    assert len(chains) <= 1 and all(isinstance(chain, DraftChain) and not chain.places for chain in chains)


@pytest.mark.parametrize("recovered", [65, 66])
def test_a_token_drawn_in_place_of_a_draft_may_be_that_draft(recovered: int) -> None:
    """A device that breaks the rule of rejection leads the cloud to a row that it has computed already."""
    flat = Dist(np.array([65, 66], dtype=np.int32), np.array([0.5, 0.5]))
    probs, left = encode_prob(1.0), None
    for seed in range(20):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        options = VerifyOptions(rescoring=False, verifier="rejection", waits=True)
        cloud = TargetWriter(a_config("cloud", False, sampling, 400, EOS, VOCAB, joined=True, options=options))
        cloud.on(Started(0.0))
        (prefill,) = forwards(cloud.on(FOUND))
        cloud.on(Scored(prefill.ticket, (flat,), 0.1))
        (step,) = forwards(cloud.on(Received(DraftChain(0, 0, 1, 0, places([65]), probs=probs))))
        effects = cloud.on(Scored(step.ticket, (flat, flat), 0.2))
        left = next((e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Rejected)), None)
        if left is not None:
            break
    assert left is not None
    drawn = DraftChain(0, 0, left.start + len(left.tokens) + 1, 0, b"", last=True, recovered=recovered)
    assert forwards(cloud.on(Received(drawn))), "it goes on"


# ---- the drafter's chain and the verifier's copy of it agree, whatever becomes of drafts and messages ---------------
AGREEMENT = Agreement(SamplingParams())


def take(copy: PeerChain, message: DraftChain) -> None:
    copy.receive(message, AGREEMENT.received(message))


def below(copy: PeerChain, targets: list[int]) -> list[int] | None:
    drafts = copy.below(targets)
    return None if drafts is None else [draft.token for draft in drafts]


def chain(base: int, offset: int, *tokens: int) -> DraftChain:
    return DraftChain(0, 0, base, offset, places(tokens))


@given(st.integers(0, 2**32))
def test_the_verifiers_copy_holds_a_beginning_of_what_follows_its_targets(seed: int) -> None:
    """Random drafts, verdicts, losses, repetitions and reorderings: what the verifier reads below its targets is what
    the drafter had below the same prefix, or nothing."""
    draw = random.Random(seed)
    tree, drafted = PrefixTree(0), Chain(0)
    copy, targets, known = PeerChain(), [], 0
    sent: list[DraftChain] = []
    drafts_below: dict[tuple[int, ...], set[int]] = {}  # prefix -> tokens ever drafted after it
    for _ in range(40):
        action = draw.choice(("draft", "send", "deliver", "verify", "hear", "resend"))
        if action == "draft":
            last = drafted.drafted[-1].node if drafted.drafted else tree.head
            token = draw.randrange(3)
            prefix = (*targets[:known], *(each.draft.token for each in drafted.drafted))
            drafts_below.setdefault(prefix, set()).add(token)
            drafted.drafted.append(Drafted(last.child(token), Draft(token), 0.0))
        elif action == "send" and drafted.unsent:
            sent.append(chain(drafted.base, drafted.sent, *(draft.token for draft in drafted.unsent)))
            drafted.sent += len(drafted.unsent)
        elif action == "resend":
            drafted.resend(known)
        elif action == "deliver" and sent:
            take(copy, draw.choice(sent))
        elif action == "verify":
            known_below = below(copy, targets) or []
            targets.append(known_below[0] if known_below and draw.random() < 0.7 else draw.randrange(3))
        elif action == "hear" and known < len(targets):
            drafted.advance(tree.advance(targets[known]))
            known += 1
        path = list(targets)
        for token in below(copy, targets) or []:
            assert token in drafts_below.get(tuple(path), set())
            path.append(token)


def test_targets_wait_for_those_before_them_and_of_two_the_longer_counts() -> None:
    early = EarlyTargets()
    early.add(Targets(0, 0, 2, [7], b""), 0)
    assert early.pop(0) is None
    early.add(Targets(0, 0, 0, [5, 6], b""), 0)
    early.add(Targets(0, 0, 0, [5], b""), 0)
    first = early.pop(0)
    assert first is not None and first.tokens == [5, 6]
    second = early.pop(2)
    assert second is not None and second.start == 2
    for start in range(MAX_EARLY + 10):
        early.add(Targets(0, 0, 100 + start, [], b""), 0)
    assert early.pop(0) is None and len([1 for _ in iter(lambda: early.pop(10_000), None)]) == MAX_EARLY


def test_targets_that_wait_have_a_limit_of_bytes_which_counts_their_distributions() -> None:
    half, most = MAX_EARLY_BYTES // 2, MAX_EARLY_BYTES // TOKEN_BYTES
    early = EarlyTargets()
    early.add(Targets(0, 0, 10, [1] * (most // 2), b""), 0)
    early.add(Targets(0, 0, 20, [1], b"", b"", [DistPayload(bytes(half), b"")]), 0)
    assert early.pop(20) is not None and early.pop(20) is None, "together they would be too many"
    early.add(Targets(0, 0, 20, [1], b"", b"", [DistPayload(bytes(half), bytes(half - TOKEN_BYTES))]), 0)
    early.add(Targets(0, 0, 20, [1] * most, b""), 0)  # replaces the other, so that its room counts
    early.add(Targets(0, 0, 0, [1] * 2 * most, b""), 0)  # it need not wait
    early.add(Rejected(0, 0, 30, [], b"", b"", [], DistPayload(bytes(half), bytes(half + 1))), 0)
    taken = [early.pop(0), early.pop(20), early.pop(30)]
    assert [None if each is None else len(each.tokens) for each in taken] == [2 * most, most, None]


# ---- what verifiers ask of a request, and what a peer that breaks their rules can do --------------------------------
def test_a_device_draws_tokens_only_of_its_own_clients_answers() -> None:
    asked = RoutingContext("cloud", Wish("draft_verify", options={"verifier": "rejection"}))
    with pytest.raises(RequestError, match="ask the device"):
        check(asked)
    check(replace(asked, side="device"))
    check(routed(asked, strategy="lookup_tree"))
    check(routed(asked, options={"verifier": "truncated"}))


@pytest.mark.parametrize("front", ["cloud", "device"])
def test_both_sides_choose_the_same_verifier(front: Side) -> None:
    for verifier in ("agreement", "rejection", "truncated"):
        for temperature in (0.0, 1.0):
            options = VerifyOptions(verifier=verifier)
            sampling = SamplingParams(temperature=temperature)
            config = replace(job(STRATEGIES["draft_verify"], front, sampling).config, options=options)
            both = [changed(config, side=side, faces_client=side == front) for side in ("cloud", "device")]
            kinds = {type(verifier_of(each)) for each in both}
            assert len(kinds) == 1
            if verifier == "rejection" and front == "cloud" and temperature:
                assert kinds == {Truncation}
            assert options_of(both[0]).waits == (verifier != "agreement" and temperature > 0.0)


def hostile(chance: random.Random, epoch: int, near: int) -> SessionMessage:
    """A message of the right shape that says anything."""
    start = max(0, near + chance.choice((0, 0, 0, 1, 1, -1, 5)))
    count = chance.randrange(4)
    places = encode_places([(chance.choice((65, 101, 256)), chance.choice((None, 66))) for _ in range(count)])
    match chance.randrange(5):
        case 0:
            return DraftChain(0, epoch, start, chance.randrange(3), places)
        case 1:
            probs = chance.choice((b"", bytes(chance.randrange(256) for _ in range(2 * count))))
            recovered = chance.choice((None, 65, 101, 256))
            return DraftChain(0, epoch, start, chance.randrange(2), places, chance.random() < 0.5, recovered, probs)
        case 2:
            dist = chance.choice((b"\x41\xff\xff\x03", b"\x01", b"\x00\x00\xfe\xff\x03\x00"))
            return DraftChain(0, epoch, start, 0, places, True, None, b"", [dist] * count)
        case 3:
            heads = (None, DistPayload(b"", b""), DistPayload(b"\x41", b"\x00\x00"), DistPayload(b"\x41", b"\x00\xf0"))
            return Rejected(0, epoch, start, [65] * count, b"", b"", [], chance.choice(heads))
        case _:
            return chance.choice(
                (Targets(0, epoch, start, [65, 101][:count], b""), SyncState(0, epoch, 0, start, waits=True))
            )


@pytest.mark.parametrize("verifier", ["agreement", "rejection", "truncated"])
@pytest.mark.parametrize("front", ["cloud", "device"])
def test_no_message_of_a_peer_raises_and_the_answer_ends(verifier: VerifierName, front: Side) -> None:
    """Both sides hear words of a stranger among their peer's."""
    for seed in range(6):
        chance = random.Random(f"{verifier} {front} {seed}")
        manner = Manner(options=(("verifier", verifier),))
        this = job(STRATEGIES["draft_verify"], front, SamplingParams(seed=seed), manner=manner, max_tokens=12)
        world = Simulation(this, engines(), seed=seed, network=Network((0.01, 0.05)))

        def speak(world: Simulation, chance: random.Random = chance) -> None:
            if chance.random() < 0.3 and world.events > 4:
                session = world.session(chance.choice(("cloud", "device")))
                if not session.ended and session.finished is None:
                    session.deliver_later(Received(hostile(chance, 0, len(world.front.tokens)), world.now))

        answer = world.run(speak)
        assert isinstance(answer.finished, Finish)


def test_a_probability_costs_two_bytes_and_a_truncated_distribution_about_two_an_id() -> None:
    """Fifteen drafts with ids above 2**16, in an answer's middle, in the session of a link that is long up."""
    ids = np.arange(151_000, 151_100, dtype=np.int32)
    own = OwnDist.of(Dist(ids, np.random.default_rng(1).dirichlet(np.full(len(ids), 0.3))))

    def size(verifier: Verifier) -> float:
        drafts = [verifier.draft(own, 300 + place, second=False) for place in range(15)]
        message = verifier.message(0, 300, 0, drafts, last=False, recovered=None)
        return len(encode(msgspec.structs.replace(message, session=1001))) / 15

    sampling = SamplingParams(seed=1)
    plain, with_prob = size(Agreement(sampling)), size(Rejection(sampling, precise=False))
    with_dist = size(Truncation(sampling, mass=0.99995, vocab_size=152_000))
    assert plain < 4.0 and plain + 2.0 < with_prob < 6.5 and with_dist < with_prob + 2.5 * len(ids)


# ---- drafts of tables and the text, in place of the draft model's where they are as likely --------------------------
GO_ON = tuple(b"user: go on\nassistant: ")
TOKENS = 80


def written(
    temperature: float, table: LookupTable | None, options: VerifyOptions
) -> tuple[list[int], dict[str, float]]:
    """Text of models that know two tokens back, so that it repeats itself, and the stats of the device."""
    engines: dict[Side, Engine] = {
        "cloud": FakeEngine(seed=1, order=2, spread=0.3),
        "device": FakeEngine(seed=1, order=2, spread=0.5),
    }
    config = a_config(
        "device",
        True,
        SamplingParams(temperature=temperature, seed=3),
        TOKENS,
        frozenset(),
        VOCAB,
        options,
        table=table,
        needs_dists=False,
    )
    branches: dict[Side, tuple[Branch, ...]] = {side: (Branch(GO_ON, None),) for side in engines}
    world = Simulation(
        SimulatedRequest(STRATEGIES["draft_verify"], "device", config, branches),
        engines,
        network=Network((0.02, 0.02)),
        forward={"cloud": 0.05, "device": 0.02},
    )
    tokens = list(world.run().tokens)
    finished = world.session("device").finished
    assert finished is not None
    return tokens, dict(finished.stats)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("waits", [False, True])
def test_a_text_that_repeats_itself_takes_fewer_forwards_of_the_device_and_stays_the_same(
    temperature: float, waits: bool
) -> None:
    options = VerifyOptions(rescoring=False, waits=waits, least=int(waits))
    alone, without = written(temperature, None, options)
    merged, with_tables = written(temperature, LookupTable(VOCAB), options)
    assert merged == alone and len(merged) == TOKENS
    assert without["looked_up"] == 0
    if temperature == 0.0:
        assert with_tables["looked_up"] > TOKENS / 4
        assert with_tables["forwards"] / with_tables["drafted"] < 0.8 * without["forwards"] / without["drafted"]


def test_a_draft_that_is_drawn_is_the_models() -> None:
    options = VerifyOptions(rescoring=False, verifier="truncated")
    _, stats = written(1.0, LookupTable(VOCAB), options)
    assert stats["looked_up"] == 0 and stats["drafted"] > 0


# ---- how much a step drafts, by what steps have cost and given ------------------------------------------------------
SURE, UNSURE = 0.01, 3.0  # nats


def drafted(pace: Pace, nats: float = SURE, *, ahead: int = 0, draft_s: float = 0.02, rtt: float | None = None) -> int:
    """Drafts of one step whose distributions all have this entropy."""
    if not pace.begin(ahead, draft_s, None, rtt):
        return 0
    count = 0
    while not pace.complete and pace.admits(nats):
        count += 1
    pace.end(4 * count, None)
    return count


def experienced(**fields: Any) -> OffloadStats:
    """Past the first drafts, and in the middle between two looks beyond the gate."""
    return OffloadStats(steps=1, examined=1000, **fields)


def within_budget(least: int = 0) -> Pace:
    return Pace(VerifyOptions(least=least), experienced(queue=EnergyQueue(1.2), compute_w=12.0))


def test_within_a_budget_sure_drafts_are_many_and_unsure_ones_stop_the_step() -> None:
    assert drafted(within_budget()) > 3
    assert drafted(within_budget(), UNSURE) == 0
    assert drafted(within_budget(least=1), UNSURE) == 1, "the paper drafts at least one"


def test_without_a_budget_unsure_drafts_cost_nothing() -> None:
    assert drafted(Pace(VerifyOptions(), experienced()), UNSURE) == VerifyOptions().most


def test_at_first_and_now_and_then_a_step_ignores_the_gate() -> None:
    """Else a model that is unsure and right would never be found out."""
    stats = OffloadStats(queue=EnergyQueue(1.2), compute_w=12.0)
    pace = Pace(VerifyOptions(), stats)
    assert drafted(pace, UNSURE) > 3
    for _ in range(FIRST_EXAMINED):
        pace.examined(SURE, accepted=True)
    looks = [drafted(pace, UNSURE) > 1 for _ in range(2 * PROBE_STEPS)]
    assert sum(looks) == 2


def test_drafts_that_are_never_accepted_are_tried_now_and_then_alone() -> None:
    stats = OffloadStats(queue=EnergyQueue(1.2), compute_w=12.0)
    pace = Pace(VerifyOptions(), stats)
    for _ in range(300):
        pace.examined(SURE, accepted=False)
        stats.estimates.verified.add(0.1)
    steps = [drafted(pace) for _ in range(2 * PROBE_STEPS)]
    assert sorted(set(steps)) == [0, 1] and sum(steps) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cloud_that_waits_decodes_alone_where_that_is_faster_than_drafts_and_is_asked_for_no_more(
    overlap: bool,
) -> None:
    """By round trip: a token a forward, without one, or several a forward with one. What is left out is still compared
    with the targets now and then."""
    stats = experienced()
    for number in range(300):
        stats.estimates.accepted.add(float(number % 4 > 0))
    pace = Pace(VerifyOptions(waits=True, overlap=overlap), stats)
    for rtt, streams in ((0.3, True), (0.01, False)):
        for _ in range(100):
            stats.estimates.verified.add(rtt + 0.03)
        steps = [(drafted(pace, draft_s=0.005, rtt=rtt), pace.looks) for _ in range(2 * PROBE_STEPS)]
        assert all((count == 0) is streams for count, _ in steps)
        assert sum(looks for _, looks in steps) == (2 if streams else 0)


def test_drafting_ahead_of_a_verdict_stops_where_it_is_hardly_wanted() -> None:
    stats = OffloadStats()
    for _ in range(200):
        stats.estimates.accepted.add(float(False))
        stats.estimates.accepted.add(float(True))
    pace = Pace(VerifyOptions(gate=False), stats)  # half of the drafts are accepted
    assert pace.begin(1, 0.001, None)
    pace.cancel()
    assert not pace.begin(4, 0.001, None)
    assert not Pace(VerifyOptions(overlap=False), stats).begin(1, 0.001, None)


def test_what_a_lost_cloud_leaves_out_is_no_round() -> None:
    stats = OffloadStats()
    pace = Pace(VerifyOptions(), stats)
    for step in range(50):
        pace.came(0.02 * step, 1, streamed=True)
    before = stats.estimates.streamed_s(None), stats.round_s.value
    pace.interrupt()
    pace.came(60.0, 1, streamed=True)
    assert (stats.estimates.streamed_s(None), stats.round_s.value) == before
    pace.came(60.02, 1, streamed=True)
    assert stats.estimates.streamed_s(None) == pytest.approx(0.02)
