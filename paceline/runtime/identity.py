"""Ed25519 keys, and handshakes with nonces from the operating system. The protocol is in `paceline.wire.identity`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from paceline.wire.effects import Signer
from paceline.wire.identity import DiallerHandshake, ListenerHandshake
from paceline.wire.messages import NONCE_BYTES, Introduction


class PrivateKey:
    """An Ed25519 private key. Its `seed` is the secret; nothing else shows it."""

    def __init__(self, seed: bytes) -> None:
        """Raises ValueError for a seed that has not 32 bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public_key = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        return cls(secrets.token_bytes(32))

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"PrivateKey(public_key={self.public_key.hex()[:16]}…)"


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """True if the signature of the data is by this key. Never raises."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def device_handshake(
    introduction: Introduction, *, device: str, keys: Sequence[Signer], server_key: bytes
) -> DiallerHandshake:
    """A device's handshake, for one connection."""
    known = {"pinned": server_key, "binding": server_key}
    return DiallerHandshake(introduction, device=device, keys=keys, **known, nonce=_nonce(), verify=verify)


def cloud_handshake(introduction: Introduction, key: Signer) -> ListenerHandshake:
    """A cloud's handshake, for one connection."""
    return ListenerHandshake(introduction, key=key, binding=key.public_key, nonce=_nonce(), verify=verify)


def dialling_handshake(purpose: str, key: Signer, certificate: bytes) -> DiallerHandshake:
    """The handshake of who dials a stage, for one connection. certificate: the one that was shown in TLS."""
    binding = _binding(certificate)
    return DiallerHandshake(
        None, device=purpose, keys=[key], pinned=None, binding=binding, nonce=_nonce(), verify=verify
    )


def stage_handshake(name: str, key: Signer, certificate: bytes) -> ListenerHandshake:
    """A stage's handshake with who has dialled it, for one connection. certificate: the one that it shows in TLS."""
    return ListenerHandshake(None, name=name, key=key, binding=_binding(certificate), nonce=_nonce(), verify=verify)


def _binding(certificate: bytes) -> bytes:
    """Not mistaken for the public key to which a device's handshake is bound."""
    return b"certificate " + hashlib.sha256(certificate).digest()


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)
