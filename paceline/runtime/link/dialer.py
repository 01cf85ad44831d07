"""Links of a device, which dials and reconnects (`Dialer`), and of a cloud, which accepts (`serve_websocket`).

Sessions do not outlive a connection: continuing without the peer, and resuming when it returns, is the task of
`runtime.sessions`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from starlette.websockets import WebSocket, WebSocketDisconnect

from paceline.errors import LinkClosed
from paceline.runtime.link.connection import Authenticator, KeyKeeper, KeyStore, Link
from paceline.runtime.link.emulation import Emulation, emulated
from paceline.runtime.link.transport import ServerTransport, dial, is_secret
from paceline.wire.close_codes import FATAL, FIRST_DELAY_S, MAX_DELAY_S, CloseCode
from paceline.wire.identity import DiallerHandshake, ListenerHandshake
from paceline.wire.messages import SUBPROTOCOL

SPREAD_S = 1.0  # over which the devices of a server that is lost come to the others

log = logging.getLogger("paceline.link")


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
