"""Handshake of a connection to a stage: each end proves its Ed25519 key over both nonces. Pure; signing is passed in.

    dialler: head, or stage before          listening stage
      StageHello      key, nonce        ->
                                        <-    StageChallenge  name, nonce, signature
      StageProof      signature         ->

Every signature covers the frames before it, a purpose of its own, and the binding: the fingerprint of the certificate
that the listener showed in TLS. So whoever passes these frames on between two connections of his own is found out, and
what follows is as secret as TLS makes it, without certificates that anybody issues. The head knows the stage's key by
its name; a stage knows the head's, because it pinned it when it enrolled; the head tells neighbours each other's keys.
A handshake object serves one connection: its nonce must be fresh.
"""

from __future__ import annotations

from typing import Literal

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.signing import Claim, Signer, Verify, signed_bytes
from paceline.wire.stages.messages import STAGE_VERSION, Codec, StageChallenge, StageHello, StageProof

CHALLENGE, PROOF = "stage challenge", "stage dialler"  # purposes

Purpose = Literal["head", "rows"]


class DiallerHandshake:
    """The end of the head, or of the stage before."""

    def __init__(self, key: Signer, purpose: Purpose, *, nonce: bytes, binding: bytes, verify: Verify) -> None:
        self._key = key
        self._verify = verify
        self._binding = binding
        self.hello = StageHello(STAGE_VERSION, purpose, key.public_key, nonce)

    def challenged(self, challenge: StageChallenge) -> Claim:
        """The stage's claim to its name, to be checked before `prove`. Raises RemoteProtocolError."""
        if challenge.version != STAGE_VERSION:
            what = f"this end speaks {STAGE_VERSION}, the stage {challenge.version}"
            raise RemoteProtocolError(what, close_code=CloseCode.VERSION_MISMATCH)
        signed = _challenge_bytes(self._binding, self.hello, challenge.name, challenge.nonce)
        return Claim(challenge.name, (challenge.signature,), signed, self._verify)

    def prove(self, challenge: StageChallenge) -> StageProof:
        return StageProof(self._key.sign(_proof_bytes(self._binding, self.hello, challenge)))


class ListenerHandshake:
    """The stage's end."""

    def __init__(self, key: Signer, name: str, *, nonce: bytes, binding: bytes, verify: Verify) -> None:
        self._key, self._name, self._nonce = key, name, nonce
        self._binding = binding
        self._verify = verify
        self._hello: StageHello | None = None
        self._challenge: StageChallenge | None = None

    def greeted(self, hello: StageHello) -> StageChallenge:
        """Raises RemoteProtocolError for another version."""
        if hello.version != STAGE_VERSION:
            what = f"this stage speaks {STAGE_VERSION}, the other end {hello.version}"
            raise RemoteProtocolError(what, close_code=CloseCode.VERSION_MISMATCH)
        signature = self._key.sign(_challenge_bytes(self._binding, hello, self._name, self._nonce))
        self._hello = hello
        self._challenge = StageChallenge(STAGE_VERSION, self._name, self._nonce, signature)
        return self._challenge

    def proved(self, proof: StageProof) -> bool:
        """The dialler holds the key that it named. Whether that key may dial is the caller's to know."""
        if self._hello is None or self._challenge is None:
            return False
        signed = _proof_bytes(self._binding, self._hello, self._challenge)
        return self._verify(self._hello.key, proof.signature, signed)


def _challenge_bytes(binding: bytes, hello: StageHello, name: str, nonce: bytes) -> bytes:
    return signed_bytes(CHALLENGE, binding, Codec.encode(hello), name.encode(), nonce)


def _proof_bytes(binding: bytes, hello: StageHello, challenge: StageChallenge) -> bytes:
    return signed_bytes(PROOF, binding, Codec.encode(hello), Codec.encode(challenge))
