"""Effects of the link's machine: the driver carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.wire.messages import Hello, SessionFrame, Welcome


@dataclass(frozen=True, slots=True)
class Transmit:
    """One frame for the peer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Check the credential of this device and answer with `authenticated`."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Connected:
    """The handshake is done: sessions may be opened. Once."""

    peer: Hello | Welcome


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message of an open session. With a CloseSession the session has ended on this side, too."""

    message: SessionFrame


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `tick` then. Replaces an earlier one."""

    time: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Last, once: close the connection with this code and `detail`, if it still stands. `reason` is for the user."""

    code: int
    detail: str
    reason: str
    by_peer: bool


Effect = Transmit | Authenticate | Connected | Deliver | WakeAt | Disconnected
