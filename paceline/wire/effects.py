"""Effects of the link machine, executed by its driver in order."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.wire.messages import Hello, SessionFrame, Welcome


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send one frame to the peer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Check this device's credential and call `authenticated` with the result."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Connected:
    """The handshake is done: sessions may be opened. Emitted once."""

    peer: Hello | Welcome


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


Effect = Transmit | Authenticate | Connected | Deliver | WakeAt | Disconnected
