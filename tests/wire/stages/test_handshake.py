"""The handshake of stages: that of every link, bound to the certificate of its connection."""

from __future__ import annotations

import pytest

from paceline.runtime.identity import PrivateKey, dialling_handshake, stage_handshake
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim, Disconnected
from paceline.wire.stages.link import StageMachine
from tests.wire.identities import claim_of, frame_of

HEAD, STAGE, OTHER = (PrivateKey(bytes([n]) * 32) for n in (1, 2, 3))


def ends(certificate: bytes = b"certificate", seen: bytes = b"certificate") -> tuple[StageMachine, StageMachine]:
    """(dialler, listener), the dialler's claim to be the head not sent yet."""
    return (
        StageMachine(dialling_handshake("head", HEAD, seen)),
        StageMachine(stage_handshake("s1", STAGE, certificate)),
    )


def challenge_of(dialler: StageMachine, listener: StageMachine) -> bytes:
    listener.connection_made(0.0)
    return frame_of(listener.received(frame_of(dialler.connection_made(0.0)), 0.0))


def claims(dialler: StageMachine, listener: StageMachine) -> tuple[Claim, Claim]:
    """What each end claims; both are believed."""
    of_stage = claim_of(dialler.received(challenge_of(dialler, listener), 0.0))
    of_head = claim_of(listener.received(frame_of(dialler.authenticated(STAGE.public_key, 0.0)), 0.0))
    return of_stage, of_head


def test_both_ends_prove_their_keys() -> None:
    dialler, listener = ends()
    of_stage, of_head = claims(dialler, listener)
    assert of_stage.device == "s1" and of_stage.proves(STAGE.public_key) and not of_stage.proves(OTHER.public_key)
    assert of_head.device == "head" and of_head.proves(HEAD.public_key) and not of_head.proves(OTHER.public_key)
    welcome = next(frame_of([effect]) for effect in listener.authenticated(HEAD.public_key, 0.0))
    assert not dialler.is_up and dialler.received(welcome, 0.0) and dialler.is_up and listener.is_up


def test_who_passes_frames_on_between_two_connections_is_found_out_by_both() -> None:
    of_stage, of_head = claims(*ends(certificate=b"the stage's certificate", seen=b"his own"))
    assert not of_stage.proves(STAGE.public_key)
    assert not of_head.proves(HEAD.public_key)


@pytest.mark.parametrize("refusal", [CloseCode.BAD_CREDENTIAL, CloseCode.REVOKED])
def test_a_head_tells_a_stage_that_it_does_not_know_nothing_more(refusal: CloseCode) -> None:
    dialler, listener = ends()
    dialler.received(challenge_of(dialler, listener), 0.0)
    [end] = dialler.authenticated(refusal, 0.0)
    assert isinstance(end, Disconnected) and end.code == refusal
