"""The link's machine (`paceline.wire.link`) on a real connection, clock and event loop: `PeerLink`, whoever the peer
is, and `Link`, of a device and its cloud, whose session messages go to handlers and whose outgoing queue has a bound; a
device dials and reconnects (`Dialer`), a cloud accepts (`serve_websocket`).

Sessions do not outlive a connection: continuing without the peer, and resuming when it returns, is the task of
`runtime.sessions`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

from paceline.errors import LinkClosed, PacelineError, RemoteProtocolError
from paceline.runtime.link.emulation import Emulation, emulated
from paceline.runtime.link.transport import (
    CLOSE_TIMEOUT_S,
    ServerTransport,
    Transport,
    TransportClosed,
    dial,
    is_secret,
)
from paceline.wire import effects
from paceline.wire.close_codes import FATAL, FIRST_DELAY_S, MAX_DELAY_S, CloseCode, clip
from paceline.wire.identity import CloudRenewal, DeviceRenewal, DiallerHandshake, Handshake, ListenerHandshake
from paceline.wire.link import LinkMachine, PeerMachine
from paceline.wire.messages import (
    REFUSED,
    SUBPROTOCOL,
    CloseSession,
    Frame,
    Introduction,
    OpenSession,
    SessionFrame,
)

log = logging.getLogger("paceline.link")

# The link machine's effects on keys: they read or write a registry or a file, and so take time.
#
# On a cloud a device's claim is checked and its new key kept; on a device a new key is made and the former dropped.


# The public key that proves the claim, or why it is refused; never raises for a false claim.
Authenticator = Callable[[effects.Claim], Awaitable[bytes | CloseCode]]
# (device, its present public key, its new one) -> whether the new one is stored and the present one void.
KeyKeeper = Callable[[str, bytes, bytes], Awaitable[bool]]


class KeyStore(Protocol):
    """A device's keys for one cloud. Methods raise PacelineError when nothing can be stored."""

    async def make_key(self) -> effects.Signer:
        """A key beside the present one, stored. The same one again until `settle`."""

    async def settle(self, public_key: bytes) -> None:
        """Drop all keys but this one."""


SessionHandler = Callable[[SessionFrame], object]  # the result is ignored

MAX_QUEUED_BYTES = 4 << 20  # waiting to be sent; beyond, the link is closed with TOO_SLOW


class PeerLink(ABC):
    """One connection to a peer, until it closes. Methods belong to the event loop's thread; only `run` and `close`
    wait."""

    def __init__(self, transport: Transport, machine: PeerMachine, authenticate: Authenticator | None) -> None:
        self.up = asyncio.Event()
        self.closed = asyncio.Event()
        self.close_code: int | None = None
        self.close_reason: str | None = None  # a sentence for the user
        self.total_sent = self.total_received = 0  # bytes of frames
        self.frame_bytes = 0  # of the frame that is being delivered
        self._transport = transport
        self._driven = machine
        self._authenticate = authenticate
        self._outgoing: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake_writer = asyncio.Event()  # a frame is queued, or the link has closed
        self._key_effects: asyncio.Queue[effects.KeyEffect] = asyncio.Queue()  # of few: the machine bounds them
        self._timer: asyncio.TimerHandle | None = None
        self._disconnected: effects.Disconnected | None = None
        self._running = False
        self._finished = asyncio.Event()

    # ---- what the kinds of peer differ in ---------------------------------------------------------------------------
    @abstractmethod
    def _connected(self) -> None: ...

    @abstractmethod
    def _deliver(self, message: Frame | effects.Bulk) -> None: ...

    @abstractmethod
    def _ended(self) -> None:
        """The link has closed. Called once."""

    async def _renew(self, effect: effects.MakeKey | effects.KeepKey | effects.SettleKey) -> list[effects.Effect]:
        """Part of the renewal of a key; what the machine wants then."""
        raise AssertionError(f"keys of this kind of peer are not renewed: {effect}")

    # ---- lifecycle --------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run until the link is closed; `close_reason` is set then. Called once."""
        self._running = True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write())
                others = [tasks.create_task(self._read()), tasks.create_task(self._work_on_keys())]
                self._apply(self._driven.connection_made(loop.time()))
                await self.closed.wait()
                for task in others:
                    task.cancel()
                if self._queued_bytes:
                    await asyncio.wait({writer}, timeout=CLOSE_TIMEOUT_S)
                writer.cancel()
            if (end := self._disconnected) is not None and not end.by_peer:  # else the peer has ended it itself
                try:
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self._transport.close(end.code, clip(end.detail))
                except TimeoutError:
                    log.info("the peer did not take the goodbye; the connection was cut")
        finally:
            self._apply(self._driven.close(CloseCode.CLOSING))  # without effect unless this task was cancelled
            self._transport.abort()
            self._finished.set()

    async def close(self, code: int = CloseCode.CLOSING, reason: str = "") -> None:
        """Close, and wait until `run` is done. Must not be called from a task that `run` waits for."""
        self._apply(self._driven.close(code, reason))
        if self._running:
            await self._finished.wait()

    # ---- effects ----------------------------------------------------------------------------------------------------
    def _apply(self, wanted: Iterable[effects.Effect]) -> None:
        for effect in wanted:
            match effect:
                case effects.Transmit(data):
                    self._queue(data)
                case effects.Deliver(message):
                    self._deliver(message)
                case effects.TickAt(time):
                    self._wake_at(time)
                case effects.Connected():
                    self.up.set()
                    self._connected()
                case effects.Disconnected():
                    self._on_disconnected(effect)
                case _:
                    self._key_effects.put_nowait(effect)

    def _queue(self, data: bytes) -> None:
        if self.closed.is_set():
            return
        self._outgoing.append(data)
        self._queued_bytes += len(data)
        self._wake_writer.set()

    def _wake_at(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(time, lambda: self._apply(self._driven.tick(loop.time())))

    def _on_disconnected(self, effect: effects.Disconnected) -> None:
        self.close_code, self.close_reason, self._disconnected = effect.code, effect.reason, effect
        if self._timer is not None:
            self._timer.cancel()
        if effect.by_peer or effect.code in (CloseCode.TOO_SLOW, CloseCode.HEARTBEAT_LOST):
            self._outgoing.clear()  # the peer does not read it
            self._queued_bytes = 0
        self.closed.set()
        self._wake_writer.set()
        self._ended()

    # ---- tasks ------------------------------------------------------------------------------------------------------
    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self.closed.is_set():
                data = await self._transport.recv_bytes()
                self.frame_bytes = len(data)
                self.total_received += self.frame_bytes
                self._apply(self._driven.received(data, loop.time()))
        except TransportClosed as end:
            self._apply(self._driven.connection_lost(end.code, end.reason))
        except RemoteProtocolError as error:
            self._apply(self._driven.close(error.close_code, str(error)))

    def _next_frame(self) -> bytes | None:
        return self._outgoing.popleft() if self._outgoing else None

    def _idle(self) -> None:  # noqa: B027  # a hook
        """Nothing more is to be sent now."""

    async def _write(self) -> None:
        try:
            while (data := self._next_frame()) is not None or not self.closed.is_set():
                if data is None:
                    self._idle()
                    self._wake_writer.clear()
                    await self._wake_writer.wait()
                    continue
                await self._transport.send_bytes(data)
                self.total_sent += len(data)
                self._queued_bytes -= len(data)
            self._idle()
        except TransportClosed as end:
            self._apply(self._driven.connection_lost(end.code, end.reason))

    async def _work_on_keys(self) -> None:
        while True:
            effect = await self._key_effects.get()
            if isinstance(effect, effects.Authenticate):
                admitted = await self._admit(effect.claim)
                self._apply(self._driven.authenticated(admitted, asyncio.get_running_loop().time()))
            else:
                self._apply(await self._renew(effect))

    async def _admit(self, claim: effects.Claim) -> bytes | CloseCode:
        if self._authenticate is None:
            return CloseCode.BAD_CREDENTIAL
        try:
            return await self._authenticate(claim)
        except Exception:
            log.exception("a peer's claim could not be checked")
            return CloseCode.INTERNAL_ERROR


class Link(PeerLink):
    """A connection of a device and its cloud.

    Handlers are called in the order of arrival, must not wait, and are not called when the link closes: watch `closed`
    or set `on_down` for that.
    """

    def __init__(
        self,
        transport: Transport,
        handshake: Handshake,
        *,
        authenticate: Authenticator | None = None,
        keep_key: KeyKeeper | None = None,
        key_store: KeyStore | None = None,
        on_up: Callable[[Link], None] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """authenticate, keep_key: of a cloud. key_store: of a device."""
        self._machine = LinkMachine(handshake, vocab_size=vocab_size)
        super().__init__(transport, self._machine, authenticate)
        self._keep_key, self._key_store = keep_key, key_store
        self.on_open: Callable[[OpenSession], None] | None = None  # for a session the peer opens; must `attach` it
        self.on_down: Callable[[], None] | None = None  # called once, after `up`; the last callback of this link
        self.sent_bytes: Counter[str] = Counter()  # of sessions, by kind of message
        self.on_sent: Callable[[str, int], object] | None = None  # called with kind and bytes of each of these
        self.asked = self.asks = 0  # sessions that this side has opened, and the peer
        self._on_up = on_up
        self._handlers: dict[int, SessionHandler] = {}

    # ---- properties -------------------------------------------------------------------------------------------------
    @property
    def peer(self) -> Introduction:
        """The peer's introduction. Raises LinkClosed before the handshake is done."""
        if self._machine.peer is None:
            raise LinkClosed("the handshake is not done")
        return self._machine.peer

    def tell_documents(self, count: Callable[[], int]) -> None:
        """Tell the peer with each heartbeat how many documents this side can search."""
        self._machine.documents = count

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies that both sides support; none before the handshake is done."""
        return self._machine.handshake.strategies

    @property
    def device(self) -> str:
        """The device's name; proved once the handshake is done."""
        return self._machine.handshake.device

    @property
    def renewal(self) -> CloudRenewal:
        """On a cloud: the renewal of the device's key. Raises LinkClosed before the handshake is done."""
        if not isinstance(self._machine.renewal, CloudRenewal):
            raise LinkClosed("the handshake is not done")
        return self._machine.renewal

    @property
    def rtt(self) -> float | None:
        """s, smoothed; None before the first reply to a heartbeat."""
        return self._machine.clock.rtt

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second towards the peer; None until measured as a limit."""
        return self._machine.clock.rate

    @property
    def accepting(self) -> bool:
        """True if a session can be opened now."""
        return self._machine.accepting

    # ---- sessions ---------------------------------------------------------------------------------------------------
    def open_session(self, handler: SessionHandler) -> int:
        """Allocate a session number; its OpenSession must be sent before the next is allocated. Raises LinkClosed when
        the link takes no new sessions."""
        if not self.accepting:
            raise LinkClosed(self.close_reason or "the link takes no new sessions now")
        session = self._machine.sessions.allocate()
        self._handlers[session] = handler
        return session

    def attach(self, session: int, handler: SessionHandler) -> None:
        """Call `handler` with this session's messages, up to and including its CloseSession."""
        self._handlers[session] = handler

    def detach(self, session: int, reason: str = "cancelled") -> int:
        """Remove the session's handler; if the session is open, close it. Returns the bytes sent."""
        self._handlers.pop(session, None)
        if session in self._machine.sessions and not self.closed.is_set():
            return self.send(CloseSession(session=session, reason=reason))
        return 0

    def send(self, message: SessionFrame) -> int:
        """Queue a message of a session without waiting. Returns its size in bytes; 0 if the session has just ended.

        Raises LinkClosed when the link is closed, LocalProtocolError for a message that must not be sent.
        """
        wanted = self._machine.send(message, asyncio.get_running_loop().time())
        self._apply(wanted)
        if isinstance(message, CloseSession):
            self._handlers.pop(message.session, None)
        num_bytes = next((len(effect.data) for effect in wanted if isinstance(effect, effects.Transmit)), 0)
        self.sent_bytes[message.kind] += num_bytes
        self.asked += isinstance(message, OpenSession)
        if num_bytes and self.on_sent is not None:
            self.on_sent(message.kind, num_bytes)
        return num_bytes

    def listen(self) -> float:
        """Time without any frame of the peer, s; asks for one where none has come. See `LinkMachine.listen`."""
        self._apply(self._machine.listen(asyncio.get_running_loop().time()))
        return self._machine.silence

    def renew_key(self) -> None:
        """On a cloud, once up: ask the device for a new key."""
        self._apply(self.renewal.ask())

    @property
    def is_idle(self) -> bool:
        return not self._machine.sessions

    def drain(self) -> None:
        """Refuse new sessions, and close when the open ones have ended."""
        self._apply(self._machine.drain())

    async def _renew(self, effect: effects.MakeKey | effects.KeepKey | effects.SettleKey) -> list[effects.Effect]:
        """One that fails is logged: the present key stays valid, and the cloud asks again."""
        renewal, store, keep = self._machine.renewal, self._key_store, self._keep_key
        try:
            match effect:
                case effects.MakeKey() if store is not None and isinstance(renewal, DeviceRenewal):
                    return renewal.offer(await store.make_key())
                case effects.SettleKey(key) if store is not None:
                    await store.settle(key)
                case effects.KeepKey(device, present, new) if keep is not None and isinstance(renewal, CloudRenewal):
                    return renewal.kept(new) if await keep(device, present, new) else []
        except PacelineError as error:
            log.error("this device's key cannot be renewed: %s", error)
        except Exception:
            log.exception("a device's key could not be renewed")
        return []

    # ---- effects ----------------------------------------------------------------------------------------------------
    def _connected(self) -> None:
        if self._on_up is not None:
            self._on_up(self)

    def _queue(self, data: bytes) -> None:
        super()._queue(data)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._apply(self._machine.close(CloseCode.TOO_SLOW, f"{self._queued_bytes} bytes were waiting"))

    def _deliver(self, message: Frame | effects.Bulk) -> None:
        assert isinstance(message, SessionFrame), "the machine of this link delivers no others"
        session = message.session
        try:
            if isinstance(message, OpenSession):
                self.asks += 1
                if self.on_open is not None:
                    self.on_open(message)
                if session not in self._handlers and session in self._machine.sessions:
                    self.send(CloseSession(session=session, reason=f"{REFUSED}this side takes part in no sessions"))
                return
            handler = self._handlers.get(session)
            if isinstance(message, CloseSession):
                self._handlers.pop(session, None)
            if handler is not None:
                handler(message)
        except LinkClosed:
            return  # the handler sends, and the link has been closed meanwhile
        except Exception:  # in a handler: it ends its session only
            log.exception("a session's handler failed")
            self.detach(session)

    def _ended(self) -> None:
        self._handlers.clear()
        if self.up.is_set() and self.on_down is not None:
            self.on_down()


class SentToday:
    """Bytes that have left this side since midnight, or since the start, by hour and kind."""

    def __init__(self) -> None:
        self._day = ""
        self._hours: dict[str, Counter[str]] = {}

    def add(self, kind: str, num_bytes: int) -> None:
        self._turn()
        self._hours.setdefault(time.strftime("%H"), Counter())[kind] += num_bytes

    def by_hour(self) -> dict[str, dict[str, int]]:
        self._turn()
        return {hour: dict(kinds) for hour, kinds in self._hours.items()}

    def _turn(self) -> None:
        day = time.strftime("%Y-%m-%d")
        if day != self._day:
            self._day, self._hours = day, {}


# ---- who dials, and who accepts -------------------------------------------------------------------------------------
SPREAD_S = 1.0  # over which the devices of a server that is lost come to the others


def back_off(attempt: int, uniform: float, longest: float = MAX_DELAY_S) -> float:
    """Delay in s before the next attempt after `attempt` failures in a row. Full jitter, so that devices do not
    reconnect all at once when a server restarts. uniform: in [0, 1)."""
    return uniform * min(longest, FIRST_DELAY_S * 2.0 ** min(attempt, 16))


class Dialer:
    """Keeps one link to a cloud, from `run` until that is cancelled.

    `handshake` is called at each attempt: nonces serve once, and documents and keys change. `up` is called with each
    link once it is admitted and sets its `on_open`. A refusal that only a person can resolve is logged once and tried
    again every 30 s.
    """

    def __init__(
        self,
        url: str,
        handshake: Callable[[], DiallerHandshake],
        *,
        others: Sequence[str] = (),
        key_store: KeyStore | None = None,
        up: Callable[[Link], None] = lambda _: None,
        emulation: Emulation | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """others: URLs of servers that know this device as well, tried in turn, without a pause until none has
        answered; the one that was linked last is the first, unless it fell silent."""
        self._urls = [url, *others]  # the one to try next is the first
        self._reasons: dict[str, str] = {}  # told since there was a link
        self._handshake = handshake
        self._key_store = key_store
        self._up = up
        self._emulation = emulation
        self._vocab_size = vocab_size

    async def run(self) -> None:
        """Run until cancelled. Raises ConfigError for an invalid URL."""
        for url in self._urls:
            if not is_secret(url):
                log.warning("%s is not encrypted: whoever is in between reads what is written; use wss://", url)
        failures = tried = 0  # rounds in a row without a link; URLs of this one
        while True:
            url = self._urls[0]
            code, reason, was_up = await self._one_link(url)
            if reason != self._reasons.get(url):  # once, not at every attempt
                log.warning("no link to %s: %s", url, reason)
            self._reasons[url] = reason
            tried = 0 if was_up else tried + 1
            if code is not None and code in FATAL:
                await asyncio.sleep(MAX_DELAY_S)
            elif was_up:
                failures = 0
                await asyncio.sleep(random.random() * SPREAD_S if len(self._urls) > 1 else back_off(0, random.random()))
            elif tried % len(self._urls) == 0:
                failures += 1
                await asyncio.sleep(back_off(failures, random.random()))
            if not was_up or code == CloseCode.HEARTBEAT_LOST:  # one that hangs takes connections, and answers none
                self._urls.append(self._urls.pop(0))

    async def _one_link(self, url: str) -> tuple[int | None, str, bool]:
        """Connect and run one link: (close code if connected, sentence, whether it was admitted)."""
        try:
            connection = await dial(url)
        except LinkClosed as error:
            return None, str(error), False
        async with emulated(connection, self._emulation) as transport:
            link = Link(
                transport,
                self._handshake(),
                key_store=self._key_store,
                on_up=self._connected,
                vocab_size=self._vocab_size,
            )
            await link.run()
        return link.close_code, link.close_reason or "", link.up.is_set()

    def _connected(self, link: Link) -> None:
        log.info("linked to %s", self._urls[0])
        self._reasons.clear()
        self._up(link)


async def serve_websocket(
    websocket: WebSocket,
    *,
    handshake: ListenerHandshake,
    authenticate: Authenticator,
    keep_key: KeyKeeper | None = None,
    on_link: Callable[[Link], None],
    emulation: Emulation | None = None,
    vocab_size: int | None = None,
) -> None:
    """Serve one device's connection until it closes, within a server's route.

    `on_link` is called once the device is admitted; it sets `on_open` and `on_down`. The server must run with
    `UVICORN_LINK_OPTIONS`.
    """
    supported = SUBPROTOCOL in websocket.scope["subprotocols"]
    try:
        await websocket.accept(subprotocol=SUBPROTOCOL if supported else None)
    except (WebSocketDisconnect, RuntimeError):
        return  # closed during the handshake
    own = ServerTransport(websocket)
    if not supported:
        # Accepted first: only an accepted connection can be closed with a code and a sentence.
        await own.close(CloseCode.VERSION_MISMATCH, f"this server speaks {SUBPROTOCOL}")
        own.abort()
        return

    def admitted(link: Link) -> None:
        own.admitted()
        on_link(link)

    async with emulated(own, emulation) as transport:
        link = Link(
            transport,
            handshake,
            authenticate=authenticate,
            keep_key=keep_key,
            on_up=admitted,
            vocab_size=vocab_size,
        )
        await link.run()
    # Refused connections are logged at debug level only: anyone can make thousands.
    log.log(logging.INFO if link.up.is_set() else logging.DEBUG, "link closed: %s", link.close_reason)
