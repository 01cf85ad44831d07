"""What the handshake needs of a signature scheme, and the bytes that are signed. The scheme itself is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.wire.messages import VERSION

DOMAIN = b"paceline"  # no other protocol signs bytes that begin with it

Verify = Callable[[bytes, bytes, bytes], bool]  # (public key, signature, signed bytes); never raises


class Signer(Protocol):
    """A private key. Signatures are those of Ed25519, RFC 8032."""

    @property
    def public_key(self) -> bytes: ...

    def sign(self, data: bytes) -> bytes: ...


def signed_bytes(purpose: str, *parts: bytes) -> bytes:
    """Bytes to sign: domain, protocol version and purpose, then the parts, each behind its length in four bytes.

    Different purposes or lists of parts never give equal bytes, so a signature serves the one purpose it was made for.
    """
    fields = (DOMAIN, str(VERSION).encode(), purpose.encode(), *parts)
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


@dataclass(frozen=True, slots=True)
class Claim:
    """A device's claim to its name, to be checked against the keys that are known for it."""

    device: str
    signatures: tuple[bytes, ...]
    signed: bytes
    verify: Verify

    def proves(self, key: bytes) -> bool:
        """True if the device holds the private key of this public one."""
        return any(self.verify(key, signature, self.signed) for signature in self.signatures)
