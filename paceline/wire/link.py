"""The link as a state machine: handshake, heartbeat, sessions and closing. Knows no socket and no clock; frames of the
connection, TLS and waiting are the driver's (`paceline.runtime.link`).

Two kinds of peer have one machine (`PeerMachine`) and differ in what is spoken once the handshake is done: sessions of
a device and its cloud (`LinkMachine`), commands and rows of a model in stages (`paceline.wire.stages.link`).

The lifecycle is the table `NEXT`. A message that it does not allow closes the link with a named code; a
transition of this side that it does not allow is a bug. Who may link is decided outside: the machine asks with the
effect `Authenticate` and receives the result through `authenticated`; until then it accepts no message.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum

import msgspec

from paceline.core.clock import LinkClock
from paceline.errors import LinkClosed, LinkError, LocalProtocolError, RemoteProtocolError
from paceline.wire import messages
from paceline.wire.close_codes import CloseCode, remote_fault, sentence
from paceline.wire.codec import decode, encode, peek_version
from paceline.wire.effects import Authenticate, Connected, Deliver, Disconnected, Effect, SettleKey, TickAt, Transmit
from paceline.wire.identity import CloudRenewal, DeviceRenewal, DiallerHandshake, Handshake, ListenerHandshake, Renewal
from paceline.wire.messages import Frame, Introduction, Message

# Transition table of a link's lifecycle; a transition that is not in it is not allowed. Drawn in openapi/link.md.


class Role(Enum):
    DIALLER = "dialler"
    LISTENER = "listener"


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
    TRAFFIC = "message of a session or a stage"
    HEARTBEAT = "ping or pong"
    DRAIN = "drain, sent or received"
    IDLE = "last session ended"  # on the side that asked to drain
    CLOSE = "refused, lost or closed"


# Of both roles: once the handshake is done, and the end at any time.
_BOTH: dict[tuple[LinkState, Trigger], LinkState] = {
    **{
        (state, trigger): state
        for state in (LinkState.READY, LinkState.DRAINING)
        for trigger in (Trigger.TRAFFIC, Trigger.HEARTBEAT, Trigger.RENEWAL)
    },
    (LinkState.READY, Trigger.DRAIN): LinkState.DRAINING,
    (LinkState.DRAINING, Trigger.DRAIN): LinkState.DRAINING,
    (LinkState.DRAINING, Trigger.IDLE): LinkState.CLOSED,
    **{(state, Trigger.CLOSE): LinkState.CLOSED for state in list(LinkState) if state is not LinkState.CLOSED},
}

NEXT: dict[Role, dict[tuple[LinkState, Trigger], LinkState]] = {
    Role.DIALLER: {
        (LinkState.OPENING, Trigger.CHALLENGE): LinkState.AUTHENTICATING,
        (LinkState.AUTHENTICATING, Trigger.ADMITTED): LinkState.CHALLENGED,
        (LinkState.CHALLENGED, Trigger.WELCOME): LinkState.READY,
        **_BOTH,
    },
    Role.LISTENER: {
        (LinkState.OPENING, Trigger.HELLO): LinkState.CHALLENGED,
        (LinkState.CHALLENGED, Trigger.PROOF): LinkState.AUTHENTICATING,
        (LinkState.AUTHENTICATING, Trigger.ADMITTED): LinkState.READY,
        **_BOTH,
    },
}

TRIGGERS: dict[type[Frame], Trigger] = {  # of messages from the peer; all others are traffic
    messages.Hello: Trigger.HELLO,
    messages.Challenge: Trigger.CHALLENGE,
    messages.Proof: Trigger.PROOF,
    messages.Welcome: Trigger.WELCOME,
    messages.RenewKey: Trigger.RENEWAL,
    messages.NewKey: Trigger.RENEWAL,
    messages.KeyKept: Trigger.RENEWAL,
    messages.Ping: Trigger.HEARTBEAT,
    messages.Pong: Trigger.HEARTBEAT,
    messages.Drain: Trigger.DRAIN,
}


# Open sessions of a connection and allocation of their numbers.
#
# Numbers are even on the cloud, odd on the device, and increase: a number above the highest was never opened, one
# below it that is not open has ended or was left out. Ended sessions take no memory.
#
# A new number is above all that this side has seen, its own and the peer's (Lamport 1978). So both sides agree in
# which order sessions came, and serve them in that order where they compete: see `core.batching.pending.Group`.


MAX_SESSIONS = 256  # open at once, of each opener
MAX_SKIPPED = 1 << 20  # numbers that an opener may leave out at once: else its peer would soon have none left


class SessionTable:
    """own_parity: parity of the numbers this side allocates."""

    def __init__(self, own_parity: int) -> None:
        self._own_parity = own_parity
        self._open: set[int] = set()
        self._highest = {0: -2, 1: -1}  # by parity
        self._allocated = self._highest[own_parity]

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session: int) -> bool:
        return session in self._open

    def allocate(self) -> int:
        """Allocate a number of this side. Sessions must be opened in the order of their numbers."""
        seen = max(self._allocated, *self._highest.values())
        self._allocated = seen + 1 + (seen + 1 - self._own_parity) % 2
        return self._allocated

    def open_own(self, session: int) -> None:
        """Open a session of this side. Raises LocalProtocolError for a number that is not this side's or not new,
        LinkError when too many are open."""
        if session % 2 != self._own_parity or session <= self._highest[self._own_parity]:
            raise LocalProtocolError(f"session {session} cannot be opened: take the numbers in order")
        if self._count(self._own_parity) >= MAX_SESSIONS:
            raise LinkError(f"{MAX_SESSIONS} sessions are open on this link already")
        self._highest[self._own_parity] = session
        self._allocated = max(session, self._allocated)
        self._open.add(session)

    def open_by_peer(self, session: int, *, refuse: bool) -> str | None:
        """Open a session of the peer; the reason if it is refused. Raises RemoteProtocolError for a number that is not
        the peer's, not new, or far from all before."""
        parity = 1 - self._own_parity
        if session % 2 != parity or session <= self._highest[parity]:
            raise remote_fault(f"session {session} opened again or by the wrong side", CloseCode.BAD_SESSION)
        if session > max(self._allocated, *self._highest.values()) + MAX_SKIPPED:
            raise remote_fault(f"session {session} leaves out too many numbers", CloseCode.BAD_SESSION)
        self._highest[parity] = session
        if refuse:
            return "one side is going away"
        if self._count(parity) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open on this link already"
        self._open.add(session)
        return None

    def close(self, session: int) -> None:
        self._open.discard(session)

    def was_opened(self, session: int) -> bool:
        """True if it is open, or has ended."""
        return session <= self._highest[session % 2]

    def _count(self, parity: int) -> int:
        return sum(session % 2 == parity for session in self._open)


HANDSHAKE_S = 5.0  # limit for an unauthenticated peer
HEARTBEAT_S = 3.0
MAX_MISSED = 2  # heartbeats without any frame: a dead peer is noticed within 6 to 9 s
LISTEN_S = 0.2  # least time between two signs of life that are asked for
MAX_LISTEN_S = 1.0  # a longer one, and nobody has listened, or this side was suspended: silence counts from now on
PROBED_BYTES = 16_384  # sent since the last ping: send another, to measure the bandwidth


class PeerMachine(ABC):
    """One end of one connection, whose role is that of the handshake: handshake, heartbeat and closing.

    Times are seconds of any monotonic clock. Does not reconnect or resend.
    """

    heartbeat_s = HEARTBEAT_S
    max_missed = MAX_MISSED

    def __init__(self, handshake: Handshake) -> None:
        self.role = Role.DIALLER if isinstance(handshake, DiallerHandshake) else Role.LISTENER
        self.state = LinkState.OPENING
        self.handshake = handshake
        self.peer: Introduction | None = None
        self.documents: Callable[[], int | None] = lambda: None  # of this side now, told with each heartbeat
        self.clock = LinkClock()  # towards the peer
        self.heard_at = -math.inf  # the last frame
        self._deadline = 0.0
        self._missed = 0
        self._received_any = True  # since the last ping

    @property
    def is_up(self) -> bool:
        """True if the handshake is done and the link is not closed."""
        return self.state in (LinkState.READY, LinkState.DRAINING)

    # ---- inputs -----------------------------------------------------------------------------------------------------
    def connection_made(self, now: float) -> list[Effect]:
        """The connection is open. First input, once."""
        self._deadline = now + HANDSHAKE_S
        hello = [Transmit(self.handshake.begin())] if isinstance(self.handshake, DiallerHandshake) else []
        return [*hello, TickAt(self._deadline)]

    def received(self, data: bytes, now: float) -> list[Effect]:
        """One frame from the peer. Never raises: a bad frame closes the link."""
        if self.state is LinkState.CLOSED:
            return []
        self._received_any, self.heard_at = True, now
        try:
            return self._receive(data, now)
        except RemoteProtocolError as error:
            return self.close(error.close_code, str(error))

    def authenticated(self, admitted: bytes | CloseCode, now: float) -> list[Effect]:
        """Result of `Authenticate`: the public key that proves the claim admits the peer, a close code refuses it."""
        if self.state is LinkState.CLOSED:
            return []
        if self.state is not LinkState.AUTHENTICATING:
            raise LocalProtocolError("nothing was to be authenticated")
        if isinstance(admitted, CloseCode):
            return self.close(admitted)
        if isinstance(self.handshake, DiallerHandshake):
            self._step(Trigger.ADMITTED)
            return [Transmit(self.handshake.prove(admitted))]
        try:
            welcome, peer = self.handshake.admitted(admitted)
        except RemoteProtocolError as error:
            return self.close(error.close_code, str(error))
        self._step(Trigger.ADMITTED)
        return [Transmit(welcome), *self._connected(peer, admitted, now)]

    def tick(self, now: float) -> list[Effect]:
        """Time has passed. Harmless before the deadline."""
        if self.state is LinkState.CLOSED:
            return []
        if now < self._deadline:
            return [TickAt(self._deadline)]
        if not self.is_up:
            return self.close(CloseCode.HANDSHAKE_TIMEOUT)
        # Heartbeats are counted, not seconds: after suspend, this side's own sleep must not count as silence of the
        # peer.
        self._missed = 0 if self._received_any else self._missed + 1
        if self._missed >= self.max_missed:
            return self.close(CloseCode.HEARTBEAT_LOST)
        return self._ping(now)

    def close(self, code: int, detail: str = "") -> list[Effect]:
        return self._disconnect(code, detail, by_peer=False)

    def connection_lost(self, code: int, detail: str = "") -> list[Effect]:
        """The connection is gone: the peer closed it with this code, or it broke (1006)."""
        return self._disconnect(code, detail, by_peer=True)

    # ---- what the kinds of peer differ in ---------------------------------------------------------------------------
    @abstractmethod
    def _decode(self, data: bytes) -> Frame: ...

    @abstractmethod
    def _heard(self, message: Frame, now: float) -> list[Effect]:
        """A message of the traffic, which the table allows."""

    # ---- receiving --------------------------------------------------------------------------------------------------
    def _receive(self, data: bytes, now: float) -> list[Effect]:
        if self.state is LinkState.OPENING and self.role is Role.LISTENER:
            version = peek_version(data)
            if version not in (None, messages.VERSION):
                what = f"who dialled speaks {version}, who listens {messages.VERSION}"
                raise remote_fault(what, CloseCode.VERSION_MISMATCH)
        message = self._decode(data)
        trigger = TRIGGERS.get(type(message), Trigger.TRAFFIC)
        if trigger is Trigger.TRAFFIC and self.is_up:  # nearly all: the table allows it and changes nothing
            return self._heard(message, now)
        self._step(trigger, received=message)
        match message:
            case messages.Hello() | messages.Challenge() | messages.Proof() | messages.Welcome():
                return self._on_handshake(message, data, now)
            case messages.Ping(sent_at=sent_at, documents=documents):
                if self.peer is not None and documents is not None:
                    self.peer = msgspec.structs.replace(self.peer, documents=documents)
                return [Transmit(encode(messages.Pong(sent_at=sent_at, held_s=0.0)))]  # answered within the same input
            case messages.Pong():
                self.clock.answered(message.sent_at, now, message.held_s)
                return []
            case _:
                return self._heard(message, now)

    def _on_handshake(self, message: Message, frame: bytes, now: float) -> list[Effect]:
        """A message of the handshake in its turn; whose turn it is, the table says."""
        match self.handshake, message:
            case ListenerHandshake() as listener, messages.Hello():
                return [Transmit(listener.greeted(message, frame))]
            case DiallerHandshake(pinned=pinned) as dialler, messages.Challenge():
                claim = dialler.challenged(message, frame)
                if pinned is None:
                    return [Authenticate(claim)]
                return self.authenticated(pinned if claim.proves(pinned) else CloseCode.SERVER_KEY_CHANGED, now)
            case ListenerHandshake() as listener, messages.Proof():
                return [Authenticate(listener.proved(message, frame))]
            case DiallerHandshake() as dialler, messages.Welcome(key=key):
                peer = dialler.welcomed(message, frame)
                settled = [SettleKey(key)] if len(dialler.keys) > 1 else []
                return [*settled, *self._connected(peer, key, now)]
        raise AssertionError("the table allows no other")

    # ---- common -----------------------------------------------------------------------------------------------------
    def _step(self, trigger: Trigger, *, received: Frame | None = None) -> None:
        following = NEXT[self.role].get((self.state, trigger))
        if following is not None:
            self.state = following
        elif received is not None:
            what = f"a {received.__struct_config__.tag} message while {self.state.value}"
            raise remote_fault(what, CloseCode.UNEXPECTED_MESSAGE)
        else:
            raise LocalProtocolError(f"{trigger.value} while {self.state.value}")

    def _connected(self, peer: Introduction | None, key: bytes, now: float) -> list[Effect]:  # noqa: ARG002  # see below
        """key: the dialler's public one."""
        self.peer = peer
        return [Connected(peer), *self._ping(now)]

    def _ping(self, now: float) -> list[Effect]:
        """Send the heartbeat and set the deadline of the next."""
        self._received_any = False
        self._deadline = now + self.heartbeat_s
        return [self._probe(now, self.documents()), TickAt(self._deadline)]

    def _probe(self, now: float, documents: int | None = None) -> Transmit:
        self.clock.pinged(now)
        return Transmit(encode(messages.Ping(now, documents)))

    def _disconnect(self, code: int, detail: str, *, by_peer: bool) -> list[Effect]:
        if self.state is LinkState.CLOSED:
            return []
        self._step(Trigger.CLOSE)
        return [Disconnected(code, detail, sentence(code, detail), by_peer)]


class LinkMachine(PeerMachine):
    """One end of the link of a device and its cloud. Does not keep sessions over connections."""

    def __init__(self, handshake: Handshake, *, vocab_size: int | None = None) -> None:
        super().__init__(handshake)
        self.renewal: Renewal | None = None  # once the handshake is done
        self.silence = 0.0  # s, while `listen` was called, without any frame
        self.sessions = SessionTable(own_parity=1 if self.role is Role.DIALLER else 0)
        self._vocab_size = vocab_size
        self._unprobed = 0  # bytes since the last ping
        self._listened_at = -math.inf
        self._sent_drain = False  # this side sent Drain

    @property
    def accepting(self) -> bool:
        """True if a session can be opened now."""
        return self.state is LinkState.READY

    def received(self, data: bytes, now: float) -> list[Effect]:
        self.silence = 0.0
        return super().received(data, now)

    def listen(self, now: float) -> list[Effect]:
        """Measure `silence`: called while somebody waits for the peer. Where no frame has come since the last call,
        a ping asks for one: a live peer answers within a round trip, whatever its sessions do."""
        since = now - self._listened_at
        if since < LISTEN_S or not self.is_up:
            return []
        heard, self._listened_at = self.heard_at >= self._listened_at, now
        self.silence = 0.0 if heard or since > MAX_LISTEN_S else self.silence + since
        return [] if heard else [self._probe(now)]

    def send(self, message: messages.SessionFrame, now: float | None = None) -> list[Effect]:
        """Send a message of a session; no effect if the session has just ended and its CloseSession is being delivered.

        now: allows a ping to follow when a bandwidth measurement is due. Raises LinkClosed when the link is closed, or
        draining and the message opens a session; LocalProtocolError for an unknown session, a session number used
        before, or a message above the frame limit.
        """
        if self.state is LinkState.CLOSED:
            raise LinkClosed("the link is closed")
        if not self.is_up:
            raise LocalProtocolError("nothing can be sent before the handshake is done")
        if isinstance(message, messages.OpenSession):
            if self.state is LinkState.DRAINING:
                raise LinkClosed("the link takes no new sessions: one side is going away")
            data = encode(message)
            self.sessions.open_own(message.session)
            return [Transmit(data), *self._count(data, now)]
        if not self.sessions.was_opened(message.session):
            raise LocalProtocolError(f"session {message.session} was never opened")
        if message.session not in self.sessions:
            return []
        data = encode(message)
        if isinstance(message, messages.CloseSession):
            self.sessions.close(message.session)
        return [Transmit(data), *self._count(data, now), *self._disconnect_if_idle()]

    def drain(self) -> list[Effect]:
        """Refuse new sessions and close when the open ones have ended. Before the handshake is done, close at once."""
        if self.state is LinkState.CLOSED or self._sent_drain:
            return []
        if not self.is_up:
            return self.close(CloseCode.DRAINED)
        self._step(Trigger.DRAIN)
        self._sent_drain = True
        return [Transmit(encode(messages.Drain())), *self._disconnect_if_idle()]

    def _decode(self, data: bytes) -> Message:
        return decode(data, vocab_size=self._vocab_size)

    def _heard(self, message: Frame, now: float) -> list[Effect]:
        match message:
            case messages.RenewKey() | messages.NewKey() | messages.KeyKept():
                assert self.renewal is not None, "the table allows it after the handshake alone"
                return self.renewal.received(message, now)
            case messages.OpenSession(session=session):
                refusal = self.sessions.open_by_peer(session, refuse=self.state is LinkState.DRAINING)
                if refusal is None:
                    return [Deliver(message)]
                return [Transmit(encode(messages.CloseSession(session=session, reason=f"{messages.REFUSED}{refusal}")))]
            case messages.SessionFrame(session=session) if not self.sessions.was_opened(session):
                raise remote_fault(f"session {session} was never opened", CloseCode.BAD_SESSION)
            case messages.SessionFrame(session=session) if session in self.sessions:
                if isinstance(message, messages.CloseSession):
                    self.sessions.close(session)
                return [Deliver(message), *self._disconnect_if_idle()]
            case _:
                return []  # of a session that has just ended on this side; of Drain the transition is all to be done

    def _connected(self, peer: Introduction | None, key: bytes, now: float) -> list[Effect]:
        hand = self.handshake
        self.renewal = DeviceRenewal(hand, key) if isinstance(hand, DiallerHandshake) else CloudRenewal(hand, key)
        return super()._connected(peer, key, now)

    def _probe(self, now: float, documents: int | None = None) -> Transmit:
        self._unprobed = 0
        return super()._probe(now, documents)

    def _count(self, data: bytes, now: float | None) -> list[Effect]:
        self.clock.sent(len(data), now)
        self._unprobed += len(data)
        return [self._probe(now)] if now is not None and self._unprobed >= PROBED_BYTES else []

    def _disconnect_if_idle(self) -> list[Effect]:
        if not self._sent_drain or len(self.sessions) > 0:
            return []
        self._step(Trigger.IDLE)
        return [Disconnected(CloseCode.DRAINED, "", sentence(CloseCode.DRAINED, ""), by_peer=False)]
