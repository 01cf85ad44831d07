"""The life of a link as a table: what it does not hold is not allowed. openapi/link.md draws it."""

from __future__ import annotations

from enum import Enum
from typing import get_args

from paceline.wire.messages import (
    CloseSession,
    Drain,
    Hello,
    Message,
    OpenSession,
    Ping,
    Pong,
    RetrievedPassages,
    SessionMessage,
    Welcome,
)


class Role(Enum):
    DEVICE = "device"
    CLOUD = "cloud"


class LinkState(Enum):
    OPENING = "opening"
    AUTHENTICATING = "authenticating"
    READY = "ready"
    DRAINING = "draining"  # the open sessions go on, no new ones
    CLOSED = "closed"


class Trigger(Enum):
    HELLO = "hello"
    ADMITTED = "admitted"
    WELCOME = "welcome"
    SESSION = "session message"
    HEARTBEAT = "ping or pong"
    DRAIN = "drain, sent or received"
    IDLE = "last session ended"  # on the side that asked to drain
    CLOSE = "refused, lost or closed"


_RUNNING = {
    (state, trigger): state
    for state in (LinkState.READY, LinkState.DRAINING)
    for trigger in (Trigger.SESSION, Trigger.HEARTBEAT)
} | {
    (LinkState.READY, Trigger.DRAIN): LinkState.DRAINING,
    (LinkState.DRAINING, Trigger.DRAIN): LinkState.DRAINING,
    (LinkState.DRAINING, Trigger.IDLE): LinkState.CLOSED,
}
_CLOSING = {(state, Trigger.CLOSE): LinkState.CLOSED for state in LinkState if state is not LinkState.CLOSED}

NEXT: dict[Role, dict[tuple[LinkState, Trigger], LinkState]] = {
    Role.DEVICE: {(LinkState.OPENING, Trigger.WELCOME): LinkState.READY}
    | _RUNNING
    | {key: state for key, state in _CLOSING.items() if key[0] is not LinkState.AUTHENTICATING},
    Role.CLOUD: {
        (LinkState.OPENING, Trigger.HELLO): LinkState.AUTHENTICATING,
        (LinkState.AUTHENTICATING, Trigger.ADMITTED): LinkState.READY,
    }
    | _RUNNING
    | _CLOSING,
}

TRIGGERS: dict[type[Message], Trigger] = {
    Hello: Trigger.HELLO,
    Welcome: Trigger.WELCOME,
    Ping: Trigger.HEARTBEAT,
    Pong: Trigger.HEARTBEAT,
    Drain: Trigger.DRAIN,
    OpenSession: Trigger.SESSION,
    CloseSession: Trigger.SESSION,
    RetrievedPassages: Trigger.SESSION,
    **dict.fromkeys(get_args(SessionMessage), Trigger.SESSION),
}
