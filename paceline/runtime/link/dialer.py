"""How links come to be: a device dials and dials again (`Dialer`), a cloud answers (`serve_websocket`).

Sessions do not outlive a connection: what goes on without the peer, and what starts again when it returns, is for
whoever runs the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from ssl import SSLContext

from starlette.websockets import WebSocket, WebSocketDisconnect

from paceline.errors import LinkClosed
from paceline.runtime.link.connection import Authenticator, Link, SessionHandler
from paceline.runtime.link.emulated_transport import emulated
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.link.transport import UVICORN_LINK_OPTIONS, ServerTransport, Transport, dial, is_secret
from paceline.wire.close_codes import FATAL, FIRST_DELAY_S, LONGEST_DELAY_S, CloseCode
from paceline.wire.messages import SUBPROTOCOL, Hello, Welcome

__all__ = [
    "UVICORN_LINK_OPTIONS",
    "Authenticator",
    "Dialer",
    "Link",
    "SessionHandler",
    "back_off",
    "serve_websocket",
]

log = logging.getLogger("paceline.link")


def back_off(attempt: int, uniform: float) -> float:
    """s to wait before the attempt after `attempt` failures in a row: full jitter, so that devices do not return as one
    when a server restarts. `uniform` is in [0, 1).
    """
    return uniform * min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempt, 16))


class Dialer:
    """Keeps one link to a cloud, from `run` until that is cancelled.

    `hello` is asked at each attempt, so that what has changed meanwhile (documents, a new credential) is told. `up` is
    called with each link once it is admitted and sets its `on_open`; `down` with the code and the sentence when it has
    closed, or could not be made. A refusal that only a person can mend is logged once and tried again every 30 s.
    """

    def __init__(
        self,
        url: str,
        hello: Callable[[], Hello],
        *,
        up: Callable[[Link], None] | None = None,
        down: Callable[[int | None, str], None] | None = None,
        emulation: Emulation | None = None,
        vocab_size: int | None = None,
        ssl: SSLContext | None = None,
        uniform: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        connect: Callable[..., Awaitable[Transport]] = dial,
    ) -> None:
        self.connected: Link | None = None  # admitted, and not closed yet
        self.last_reason: str | None = None  # why there is none, a sentence; None before the first attempt has ended
        self._url = url
        self._hello = hello
        self._up = up
        self._down = down
        self._emulation = emulation
        self._vocab_size = vocab_size
        self._ssl = ssl
        self._uniform = uniform
        self._sleep = sleep
        self._connect = connect
        self._num_links = 0

    async def run(self) -> None:
        """Until cancelled. Raises ConfigError for a URL that is none."""
        if not is_secret(self._url):
            log.warning("%s is not encrypted: whoever is in between can read the credential; use wss://", self._url)
        failures = 0
        while True:
            code, reason, was_up = await self._one_link()
            self.connected = None
            failures = 0 if was_up else failures + 1
            if reason != self.last_reason:  # once, not at every attempt
                log.warning("no link to %s: %s", self._url, reason)
            self.last_reason = reason
            if self._down is not None:
                self._down(code, reason)
            fatal = code is not None and code in FATAL
            await self._sleep(LONGEST_DELAY_S if fatal else back_off(failures, self._uniform()))

    async def _one_link(self) -> tuple[int | None, str, bool]:
        """(close code if a connection stood, sentence, was it admitted?)"""
        hello = self._hello()
        try:
            connection = await self._connect(self._url, ssl=self._ssl)
        except LinkClosed as error:
            return None, str(error), False
        async with emulated(connection, self._emulation, index=self._num_links) as transport:
            self._num_links += 1
            link = Link(transport, hello, on_up=self._went_up, vocab_size=self._vocab_size)
            await link.run()
        return link.close_code, link.close_reason or "", link.up.is_set()

    def _went_up(self, link: Link) -> None:
        log.info("linked to %s", self._url)
        self.connected, self.last_reason = link, None
        if self._up is not None:
            self._up(link)


async def serve_websocket(
    websocket: WebSocket,
    *,
    welcome: Welcome,
    authenticate: Authenticator,
    on_link: Callable[[Link], None],
    emulation: Emulation | None = None,
    vocab_size: int | None = None,
) -> None:
    """The whole life of one device's connection: for a server's route, which returns when this does.

    `on_link` is called once the device is admitted; it sets `on_open` and `on_down`. The server itself must be run with
    `UVICORN_LINK_OPTIONS`.
    """
    speaks = SUBPROTOCOL in websocket.scope["subprotocols"]
    try:
        await websocket.accept(subprotocol=SUBPROTOCOL if speaks else None)
    except (WebSocketDisconnect, RuntimeError):
        return  # gone before it began
    if not speaks:
        # Accepted all the same: only an accepted connection can be closed with a code and a sentence.
        await ServerTransport(websocket).close(CloseCode.VERSION_MISMATCH, f"this server speaks {SUBPROTOCOL}")
        return
    async with emulated(ServerTransport(websocket), emulation) as transport:
        link = Link(transport, welcome, authenticate=authenticate, on_up=on_link, vocab_size=vocab_size)
        await link.run()
    # A stranger's attempts are no news: anybody can make a thousand.
    log.log(logging.INFO if link.up.is_set() else logging.DEBUG, "link closed: %s", link.close_reason)
