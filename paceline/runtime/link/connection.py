"""Runs a link: the machine of `paceline.wire.link` on a real connection, clock and event loop. Holds no rule of its own
but the bound of the outgoing queue; what a message means is for whoever attaches a handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from paceline.errors import LinkClosed, RemoteProtocolError
from paceline.runtime.link.transport import CLOSE_TIMEOUT_S, Transport, TransportClosed
from paceline.wire.close_codes import CloseCode, clipped
from paceline.wire.effects import Authenticate, Connected, Deliver, Disconnected, Effect, Transmit, WakeAt
from paceline.wire.link import LinkMachine
from paceline.wire.messages import CloseSession, Hello, OpenSession, SessionFrame, Welcome

log = logging.getLogger("paceline.link")

SessionHandler = Callable[[SessionFrame], object]  # the result is ignored
Authenticator = Callable[[Hello], Awaitable[CloseCode | None]]  # None admits; never raises for a bad credential

MAX_QUEUED_BYTES = 4 << 20  # waiting to be sent; a peer slower than that is let go


class Link:
    """One connection to the peer, until it closes; `paceline.runtime.link.dialer` makes them.

    All methods belong to the event loop's thread and none but `run` and `close` waits. Handlers are called in the order
    of arrival, must not wait, and are told nothing when the link closes: watch `closed` or set `on_down` for that.
    """

    def __init__(
        self,
        transport: Transport,
        introduction: Hello | Welcome,
        *,
        authenticate: Authenticator | None = None,
        on_up: Callable[[Link], None] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.on_open: Callable[[OpenSession], None] | None = None  # a session the peer opens; call `attach` in it
        self.on_down: Callable[[], None] | None = None  # called once, after `up`; no handler is called any more
        self.up = asyncio.Event()
        self.closed = asyncio.Event()
        self.close_code: int | None = None
        self.close_reason: str | None = None  # a sentence for the user
        self._transport = transport
        self._machine = LinkMachine(introduction, vocab_size=vocab_size)
        self._authenticate = authenticate
        self._on_up = on_up
        self._handlers: dict[int, SessionHandler] = {}
        self._outgoing: deque[bytes] = deque()
        self._queued_bytes = 0
        self._more = asyncio.Event()  # something to send, or closed
        self._to_check: asyncio.Queue[Hello] = asyncio.Queue(maxsize=1)  # the machine asks once
        self._timer: asyncio.TimerHandle | None = None
        self._parting: Disconnected | None = None
        self._running = False
        self._finished = asyncio.Event()

    # ---- what is known ----------------------------------------------------------------------------------------------
    @property
    def peer(self) -> Hello | Welcome:
        """How the peer introduced itself. Raises LinkClosed before the handshake is done."""
        if self._machine.peer is None:
            raise LinkClosed("the handshake is not done")
        return self._machine.peer

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those both sides know; none before the handshake is done."""
        return self._machine.strategies

    @property
    def rtt(self) -> float | None:
        """s, smoothed; None before the first answer to a heartbeat."""
        return self._machine.rtt

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second towards the peer; None while nothing has shown a limit."""
        return self._machine.bandwidth.rate

    @property
    def accepting(self) -> bool:
        """Can a session be opened now?"""
        return self._machine.accepting

    # ---- sessions ---------------------------------------------------------------------------------------------------
    def open_session(self, handler: SessionHandler) -> int:
        """A number for a session of this side; its OpenSession must be sent before the next number is asked for.

        Raises LinkClosed when the link takes no new sessions.
        """
        if not self.accepting:
            raise LinkClosed(self.close_reason or "the link takes no new sessions now")
        session = self._machine.sessions.allocate()
        self._handlers[session] = handler
        return session

    def attach(self, session: int, handler: SessionHandler) -> None:
        """Hand this session's messages to `handler`, up to and including its CloseSession."""
        self._handlers[session] = handler

    def detach(self, session: int) -> int:
        """Forget the session's handler; if the session is still open, close it as cancelled. The bytes that took."""
        self._handlers.pop(session, None)
        if session in self._machine.sessions and not self.closed.is_set():
            return self.send(CloseSession(session=session, reason="cancelled"))
        return 0

    def send(self, message: SessionFrame) -> int:
        """Queue a message of a session, never waits. The bytes it takes; 0 if the session has just ended.

        Raises LinkClosed when the link is closed, LocalProtocolError for what must never be sent.
        """
        effects = self._machine.send(message, asyncio.get_running_loop().time())
        self._apply(effects)
        if isinstance(message, CloseSession):
            self._handlers.pop(message.session, None)
        return next((len(effect.data) for effect in effects if isinstance(effect, Transmit)), 0)

    # ---- life -------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until the link is closed, for whatever reason; `close_reason` has it then. Once."""
        self._running = True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write())
                others = [tasks.create_task(self._read()), tasks.create_task(self._check())]
                self._apply(self._machine.connection_made(loop.time()))
                await self.closed.wait()
                for task in others:
                    task.cancel()
                if self._outgoing:
                    await asyncio.wait({writer}, timeout=CLOSE_TIMEOUT_S)
                writer.cancel()
            await self._part()
        finally:
            self._apply(self._machine.close(CloseCode.CLOSING))  # nothing, unless this was cancelled
            self._transport.abort()
            self._finished.set()

    def drain(self) -> None:
        """Take no new sessions, and close when the open ones have ended."""
        self._apply(self._machine.drain())

    async def close(self, code: int = CloseCode.CLOSING, reason: str = "") -> None:
        """Close, and wait until `run` is done. Not from a task that `run` waits for."""
        self._apply(self._machine.close(code, reason))
        if self._running:
            await self._finished.wait()

    # ---- effects ----------------------------------------------------------------------------------------------------
    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Transmit(data):
                    self._queue(data)
                case Deliver(message):
                    self._deliver(message)
                case WakeAt(time):
                    self._wake_at(time)
                case Authenticate(hello):
                    self._to_check.put_nowait(hello)
                case Connected():
                    self.up.set()
                    if self._on_up is not None:
                        self._on_up(self)
                case Disconnected():
                    self._go_down(effect)

    def _queue(self, data: bytes) -> None:
        if self.closed.is_set():
            return
        self._outgoing.append(data)
        self._queued_bytes += len(data)
        self._more.set()
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self._apply(self._machine.close(CloseCode.TOO_SLOW, f"{self._queued_bytes} bytes were waiting"))

    def _deliver(self, message: SessionFrame) -> None:
        session = message.session
        try:
            if isinstance(message, OpenSession):
                if self.on_open is not None:
                    self.on_open(message)
                if session not in self._handlers and session in self._machine.sessions:
                    self.send(CloseSession(session=session, reason="refused: this side takes part in no sessions"))
                return
            handler = self._handlers.get(session)
            if isinstance(message, CloseSession):
                self._handlers.pop(session, None)
            if handler is not None:
                handler(message)
        except LinkClosed:
            return  # the handler wanted to answer, and the link has gone meanwhile
        except Exception:
            # A fault in one session's handler is that session's end, not every other's.
            log.exception("a session's handler failed")
            self.detach(session)

    def _wake_at(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(time, self._woke)

    def _woke(self) -> None:
        self._apply(self._machine.tick(asyncio.get_running_loop().time()))

    def _go_down(self, down: Disconnected) -> None:
        self.close_code, self.close_reason, self._parting = down.code, down.reason, down
        if self._timer is not None:
            self._timer.cancel()
        if down.by_peer or down.code in (CloseCode.TOO_SLOW, CloseCode.HEARTBEAT_LOST):
            self._outgoing.clear()  # nobody reads it
        self._handlers.clear()
        self.closed.set()
        self._more.set()
        if self.up.is_set() and self.on_down is not None:
            self.on_down()

    # ---- tasks ------------------------------------------------------------------------------------------------------
    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self.closed.is_set():
                self._apply(self._machine.received(await self._transport.recv_bytes(), loop.time()))
        except TransportClosed as gone:
            self._apply(self._machine.connection_lost(gone.code, gone.reason))
        except RemoteProtocolError as error:
            self._apply(self._machine.close(error.close_code, str(error)))

    async def _write(self) -> None:
        try:
            while self._outgoing or not self.closed.is_set():
                if not self._outgoing:
                    self._more.clear()
                    await self._more.wait()
                    continue
                data = self._outgoing[0]
                await self._transport.send_bytes(data)
                if self._outgoing:  # not given up meanwhile
                    self._outgoing.popleft()
                    self._queued_bytes -= len(data)
        except TransportClosed as gone:
            self._apply(self._machine.connection_lost(gone.code, gone.reason))

    async def _check(self) -> None:
        hello = await self._to_check.get()
        refusal: CloseCode | None = CloseCode.BAD_CREDENTIAL
        if self._authenticate is not None:
            try:
                refusal = await self._authenticate(hello)
            except Exception:
                log.exception("a device's credential could not be checked")
                refusal = CloseCode.INTERNAL_ERROR
        self._apply(self._machine.authenticated(refusal, asyncio.get_running_loop().time()))

    async def _part(self) -> None:
        if self._parting is None or self._parting.by_peer:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._transport.close(self._parting.code, clipped(self._parting.detail))
        except TimeoutError:
            log.info("the peer did not take the goodbye; the connection was cut")
