"""What verifiers ask of a request, and what a peer that breaks their rules can do."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lab.configs import changed
from lab.simulation import Network, Simulation
from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.verification import VerifierName
from paceline.errors import RequestError
from paceline.strategies.base import Finish, Received, RoutingContext, Side, Wish
from paceline.strategies.draft_verify.verifiers import (
    Agreement,
    Rejection,
    Truncation,
    Verifier,
    check,
    options_of,
    verifier_of,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import encode
from paceline.wire.messages import DistPayload, SessionMessage, SyncState, Targets
from paceline.wire.payloads import encode_places
from paceline.wire.verify_messages import DraftChain, Rejected, VerifyOptions
from tests.requests import routed
from tests.strategies.cases import Manner, engines, job


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
    sampling = SamplingParams(seed=1)
    verifiers: tuple[Verifier, ...] = (
        Agreement(sampling),
        Rejection(sampling, precise=False),
        Truncation(sampling, mass=0.99995, vocab_size=152_000),
    )
    plain, with_prob, with_dist = (
        len(
            encode(
                verifier.message(
                    0,
                    300,
                    0,
                    [verifier.draft(own, 300 + place, second=False) for place in range(15)],
                    last=False,
                    recovered=None,
                )
            )
        )
        / 15
        for verifier in verifiers
    )
    assert plain < 4.0 and plain + 2.0 < with_prob < 6.5 and with_dist < with_prob + 2.5 * len(ids)
