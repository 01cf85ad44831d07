"""Effects of the link machine, executed by its driver in order."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.wire.identity_messages import Introduction
from paceline.wire.messages import SessionFrame
from paceline.wire.signing import Claim


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send one frame to the peer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Find the key of this device that proves the claim, and call `authenticated` with it or a refusal."""

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
    """The handshake is done: sessions may be opened. Emitted once."""

    peer: Introduction


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver a message of an open session. A CloseSession has ended the session on this side, too."""

    message: SessionFrame


@dataclass(frozen=True, slots=True)
class WakeAt:
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
Effect = Transmit | KeyEffect | Connected | Deliver | WakeAt | Disconnected
