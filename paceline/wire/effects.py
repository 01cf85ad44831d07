"""Effects of the link machine, executed by its driver in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.wire.messages import VERSION, Frame, Introduction

# What the handshake needs of a signature scheme, and the bytes that are signed. The scheme itself is passed in.


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
    """A peer's claim to its name, to be checked against the keys that are known for it."""

    device: str
    signatures: tuple[bytes, ...]
    signed: bytes
    verify: Verify

    def proves(self, key: bytes) -> bool:
        """True if the peer holds the private key of this public one."""
        return any(self.verify(key, signature, self.signed) for signature in self.signatures)


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """A bulk message of a stage's link that has come as a whole."""

    header: Frame
    payload: bytes | bytearray


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send one frame to the peer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Find the key of this peer that proves the claim, and call `authenticated` with it or a refusal."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class MakeKey:
    """On a device: make a new key, store it beside the present one, and call `renewal.offer` with it."""


@dataclass(frozen=True, slots=True)
class KeepKey:
    """On a cloud: store the device's new key in place of its present one, and call `renewal.kept` if that is done."""

    device: str
    present: bytes
    new: bytes


@dataclass(frozen=True, slots=True)
class SettleKey:
    """On a device: the cloud holds this public key; drop any other."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """The handshake is done: what follows it may be sent. Emitted once. peer: None between head and stages."""

    peer: Introduction | None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver a message of an open session, or of a stage's link. A CloseSession has ended the session on this side,
    too."""

    message: Frame | Bulk


@dataclass(frozen=True, slots=True)
class TickAt:
    """Call `tick` at this time. Replaces an earlier one."""

    time: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Close the connection with this code and `detail` if it is still open. Last effect, once. `reason` is for the
    user."""

    code: int
    detail: str
    reason: str
    by_peer: bool


KeyEffect = Authenticate | MakeKey | KeepKey | SettleKey  # these may take time
Effect = Transmit | KeyEffect | Connected | Deliver | TickAt | Disconnected
