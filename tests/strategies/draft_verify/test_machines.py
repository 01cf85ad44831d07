"""Both machines by hand: what a peer that breaks rules can lead them to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lab.configs import a_config
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import (
    Branch,
    ClosePeer,
    Effect,
    Emit,
    Forward,
    LinkLost,
    MachineConfig,
    Received,
    Retrieved,
    Scored,
    Send,
    Started,
)
from paceline.strategies.draft_verify.machine import Drafter
from paceline.strategies.draft_verify.target_writer import MAX_ROWS, TargetWriter
from paceline.wire.messages import Targets
from paceline.wire.payloads import encode_places, encode_prob
from paceline.wire.verify_messages import MAX_CHAIN, DraftChain, Rejected, VerifyOptions
from tests.strategies.cases import EOS, PROMPT, VOCAB, point

FOUND = Retrieved((Branch(PROMPT, None),), None)


class OnlyA:
    """A constraint that lets 65 follow, and nothing else."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:  # noqa: ARG002  # a mask's signature
        allowed = np.zeros(VOCAB, dtype=np.bool_)
        allowed[65] = True
        return allowed


def config(side: str, **fields: object) -> MachineConfig:
    given = {"joined": True, "needs_dists": True, "options": VerifyOptions(rescoring=False)} | fields
    return a_config(side, side == "device", SamplingParams(temperature=0.0), 400, EOS, VOCAB, **given)  # type: ignore[arg-type]


def verdict(start: int, *tokens: int) -> Received:
    return Received(Targets(0, 0, start, list(tokens), b""))


def emitted(effects: Sequence[Effect]) -> list[int]:
    return [effect.token for effect in effects if isinstance(effect, Emit)]


def test_a_cloud_that_breaks_the_form_is_dropped_at_its_first_such_token_and_nothing_of_it_is_written() -> None:
    device = Drafter(config("device", mask=OnlyA()))
    device.on(Started(0.0))
    device.on(FOUND)
    effects = device.on(verdict(0, 65, 66, 65))
    assert emitted(effects) == [65] and any(isinstance(effect, ClosePeer) and effect.fault for effect in effects)
    assert emitted(device.on(verdict(1, 66, 66))) == []
    assert 66 not in emitted(device.on(LinkLost()))


def test_a_device_that_sends_many_drafts_gets_no_wider_forward() -> None:
    cloud = TargetWriter(config("cloud"))
    cloud.on(Started(0.0))
    (prefill,) = cloud.on(FOUND)
    assert isinstance(prefill, Forward)
    cloud.on(Received(DraftChain(0, 0, 0, 0, places([65] * MAX_CHAIN))))
    effects = scored(cloud, prefill)
    (forward,) = [effect for effect in effects if isinstance(effect, Forward)]
    assert len(forward.segment.tokens) == 1 + MAX_ROWS


def scored(machine: TargetWriter, forward: Forward) -> Sequence[Effect]:
    return machine.on(Scored(forward.ticket, (point(65),), 0.1))


def test_a_cloud_that_waits_for_drafts_decodes_on_once_there_are_none_until_some_come() -> None:
    cloud = TargetWriter(config("cloud", options=VerifyOptions(rescoring=False, waits=True)))
    cloud.on(Started(0.0))
    (prefill,) = cloud.on(FOUND)
    assert isinstance(prefill, Forward)
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
    cloud = TargetWriter(config("cloud"))
    cloud.on(Started(0.0))
    (prefill,) = cloud.on(FOUND)
    assert isinstance(prefill, Forward)
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
