"""Transition table of a link's lifecycle; a transition that is not in it is not allowed. Drawn in openapi/link.md."""

from __future__ import annotations

from enum import Enum

from paceline.wire.identity_messages import Challenge, Hello, KeyKept, NewKey, Proof, RenewKey, Welcome
from paceline.wire.messages import Drain, Message, Ping, Pong, SessionFrame


class Role(Enum):
    DEVICE = "device"
    CLOUD = "cloud"


class LinkState(Enum):
    OPENING = "opening"
    CHALLENGED = "challenged"
    AUTHENTICATING = "authenticating"
    READY = "ready"
    DRAINING = "draining"  # open sessions continue, new ones are refused
    CLOSED = "closed"


class Trigger(Enum):
    HELLO = "hello"
    CHALLENGE = "challenge"
    PROOF = "proof"
    ADMITTED = "admitted"
    WELCOME = "welcome"
    RENEWAL = "renewal of the key"
    SESSION = "session message"
    HEARTBEAT = "ping or pong"
    DRAIN = "drain, sent or received"
    IDLE = "last session ended"  # on the side that asked to drain
    CLOSE = "refused, lost or closed"


NEXT: dict[Role, dict[tuple[LinkState, Trigger], LinkState]] = {
    Role.DEVICE: {
        (LinkState.OPENING, Trigger.CHALLENGE): LinkState.CHALLENGED,
        (LinkState.OPENING, Trigger.CLOSE): LinkState.CLOSED,
        (LinkState.CHALLENGED, Trigger.WELCOME): LinkState.READY,
        (LinkState.CHALLENGED, Trigger.CLOSE): LinkState.CLOSED,
        (LinkState.READY, Trigger.SESSION): LinkState.READY,
        (LinkState.READY, Trigger.HEARTBEAT): LinkState.READY,
        (LinkState.READY, Trigger.RENEWAL): LinkState.READY,
        (LinkState.READY, Trigger.DRAIN): LinkState.DRAINING,
        (LinkState.READY, Trigger.CLOSE): LinkState.CLOSED,
        (LinkState.DRAINING, Trigger.SESSION): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.HEARTBEAT): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.RENEWAL): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.DRAIN): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.IDLE): LinkState.CLOSED,
        (LinkState.DRAINING, Trigger.CLOSE): LinkState.CLOSED,
    },
    Role.CLOUD: {
        (LinkState.OPENING, Trigger.HELLO): LinkState.CHALLENGED,
        (LinkState.OPENING, Trigger.CLOSE): LinkState.CLOSED,
        (LinkState.CHALLENGED, Trigger.PROOF): LinkState.AUTHENTICATING,
        (LinkState.CHALLENGED, Trigger.CLOSE): LinkState.CLOSED,
        (LinkState.AUTHENTICATING, Trigger.ADMITTED): LinkState.READY,
        (LinkState.AUTHENTICATING, Trigger.CLOSE): LinkState.CLOSED,
        (LinkState.READY, Trigger.SESSION): LinkState.READY,
        (LinkState.READY, Trigger.HEARTBEAT): LinkState.READY,
        (LinkState.READY, Trigger.RENEWAL): LinkState.READY,
        (LinkState.READY, Trigger.DRAIN): LinkState.DRAINING,
        (LinkState.READY, Trigger.CLOSE): LinkState.CLOSED,
        (LinkState.DRAINING, Trigger.SESSION): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.HEARTBEAT): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.RENEWAL): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.DRAIN): LinkState.DRAINING,
        (LinkState.DRAINING, Trigger.IDLE): LinkState.CLOSED,
        (LinkState.DRAINING, Trigger.CLOSE): LinkState.CLOSED,
    },
}

TRIGGERS: dict[type[Message], Trigger] = {
    Hello: Trigger.HELLO,
    Challenge: Trigger.CHALLENGE,
    Proof: Trigger.PROOF,
    Welcome: Trigger.WELCOME,
    RenewKey: Trigger.RENEWAL,
    NewKey: Trigger.RENEWAL,
    KeyKept: Trigger.RENEWAL,
    Ping: Trigger.HEARTBEAT,
    Pong: Trigger.HEARTBEAT,
    Drain: Trigger.DRAIN,
}


def trigger_of(message: Message) -> Trigger:
    """Lifecycle trigger of a message from the peer."""
    return Trigger.SESSION if isinstance(message, SessionFrame) else TRIGGERS[type(message)]
