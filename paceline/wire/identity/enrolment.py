"""Enrolment: a one-time code authenticates the device's public key to the server and the server's to the device. Pure.

Both derive two secrets from the code: the seed of an Ed25519 key and the key of a MAC. The device signs its request
with the first, so that only who knows the code has a key enrolled; the server answers with the MAC, so that only who
issued the code has its key pinned. Each public key also signs, as proof that its private one is held. Somebody in
between can change no byte of either, and guessing the 59 secret bits of a code from what he has seen costs one scrypt
a guess.

The server stores what the code's owner can be recognised by, the public key and the MAC key; neither lets anyone in.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

from paceline.wire.messages import VERSION
from paceline.wire.signing import signed_bytes

ALPHABET = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"  # no 0 O 1 I L, which look alike
GROUPS = 4  # of a code; the first is public, by which the code is looked up
GROUP_LETTERS = 4
CODE = re.compile(f"[{ALPHABET}]{{{GROUPS * GROUP_LETTERS}}}")
SCRYPT_COST = 1 << 14  # 16 MiB and some 0.1 s a guess, with r = 8 and p = 1
CODE_SALT = "enrolment code"  # purpose
BY_CODE, BY_DEVICE, BY_SERVER = "enrolment by code", "enrolment by device", "enrolment by server"  # purposes


@dataclass(frozen=True, slots=True)
class CodeSecrets:
    """What a code stands for."""

    id: str
    seed: bytes  # of an Ed25519 key: the device's proof
    mac_key: bytes  # the server's proof

    def __repr__(self) -> str:
        return f"CodeSecrets({self.id!r})"


def normalised(code: str) -> str:
    """Normalise a typed code: upper case, no spaces or dashes."""
    return re.sub(r"[\s-]", "", code[:64]).upper()


def code_secrets(code: str) -> CodeSecrets:
    """Derive the secrets of a code. Takes some 0.1 s. Raises ValueError for what cannot be a code."""
    letters = normalised(code)
    if not CODE.fullmatch(letters):
        raise ValueError("an enrolment code looks like K7QF-2M9X-4TBA-9HJC")
    public, secret = letters[:GROUP_LETTERS], letters[GROUP_LETTERS:]
    salt = signed_bytes(CODE_SALT, public.encode())
    derived = hashlib.scrypt(secret.encode(), salt=salt, n=SCRYPT_COST, r=8, p=1, dklen=64)
    return CodeSecrets(public, derived[:32], derived[32:])


@dataclass(frozen=True, slots=True)
class EnrolmentRequest:
    """A device's request. `version`: of the link's protocol."""

    code_id: str
    key: bytes  # the device's public key
    nonce: bytes
    code_signature: bytes
    key_signature: bytes
    version: int = VERSION

    def signed(self, purpose: str) -> bytes:
        """What the code's key (BY_CODE) and the device's (BY_DEVICE) sign."""
        return request_bytes(purpose, self.code_id, self.key, self.nonce)


def request_bytes(purpose: str, code_id: str, key: bytes, nonce: bytes) -> bytes:
    return signed_bytes(purpose, code_id.encode(), key, nonce)


def answer_bytes(request: EnrolmentRequest, device: str, server_key: bytes) -> bytes:
    """What the server's answer authenticates, by MAC and signature: the request, the device's name and its own key."""
    return signed_bytes(BY_SERVER, request.signed(BY_CODE), device.encode(), server_key)


def answer_mac(mac_key: bytes, answer: bytes) -> bytes:
    """The server's proof that it issued the code."""
    return hmac.new(mac_key, answer, hashlib.sha256).digest()
