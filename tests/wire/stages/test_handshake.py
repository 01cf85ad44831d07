"""The handshake of stages: both ends prove their keys, over one connection only."""

from __future__ import annotations

import msgspec
import pytest

from paceline.errors import RemoteProtocolError
from paceline.runtime.identity import PrivateKey, verify
from paceline.wire.stages.messages import StageChallenge, StageProof
from paceline.wire.stages.pipe import DiallerHandshake, ListenerHandshake

HEAD, STAGE, OTHER = (PrivateKey(bytes([n]) * 32) for n in (1, 2, 3))


def ends(binding: bytes = b"certificate", seen: bytes = b"certificate") -> tuple[DiallerHandshake, ListenerHandshake]:
    return (
        DiallerHandshake(HEAD, "head", nonce=b"d" * 32, binding=seen, verify=verify),
        ListenerHandshake(STAGE, "s1", nonce=b"l" * 32, binding=binding, verify=verify),
    )


def test_both_ends_prove_their_keys() -> None:
    dialler, listener = ends()
    challenge = listener.greeted(dialler.hello)
    claim = dialler.challenged(challenge)
    assert claim.device == "s1" and claim.proves(STAGE.public_key) and not claim.proves(OTHER.public_key)
    assert listener.proved(dialler.prove(challenge))


def test_a_proof_before_anything_proves_nothing() -> None:
    assert not ends()[1].proved(StageProof(b"s" * 64))


def test_who_passes_frames_on_between_two_connections_is_found_out_by_both() -> None:
    dialler, listener = ends(binding=b"the stage's certificate", seen=b"his own")
    challenge = listener.greeted(dialler.hello)
    assert not dialler.challenged(challenge).proves(STAGE.public_key)
    assert not listener.proved(dialler.prove(challenge))


@pytest.mark.parametrize("field", ["name", "nonce", "signature"])
def test_a_changed_challenge_proves_nothing(field: str) -> None:
    dialler, listener = ends()
    challenge = listener.greeted(dialler.hello)
    value = {"name": "s2", "nonce": b"x" * 32, "signature": b"y" * 64}[field]
    changed: StageChallenge = msgspec.structs.replace(challenge, **{field: value})
    assert not dialler.challenged(changed).proves(STAGE.public_key)


def test_a_key_that_is_only_named_is_not_proved() -> None:
    dialler, listener = ends()
    challenge = listener.greeted(msgspec.structs.replace(dialler.hello, key=OTHER.public_key))
    assert not listener.proved(dialler.prove(challenge))


def test_the_purpose_is_signed() -> None:
    dialler, listener = ends()
    challenge = listener.greeted(msgspec.structs.replace(dialler.hello, purpose="rows"))
    assert not listener.proved(dialler.prove(challenge))


def test_other_versions_are_refused() -> None:
    dialler, listener = ends()
    with pytest.raises(RemoteProtocolError):
        listener.greeted(msgspec.structs.replace(dialler.hello, version=99))
    challenge = listener.greeted(dialler.hello)
    with pytest.raises(RemoteProtocolError):
        dialler.challenged(msgspec.structs.replace(challenge, version=99))
