"""Links of devices to this server: admitted by credential, one per device, closed when the credential is revoked."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from typing import Protocol

from starlette.websockets import WebSocket

from paceline.runtime.link.dialer import Link, serve_websocket
from paceline.runtime.link.emulation import Emulation
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import Hello, Welcome

from .devices import Registry

PATH = "/v1/link"
WATCH_S = 1.0  # polling interval of the registry, and so about the longest life of a link after its revocation

_REFUSALS = {"admitted": None, "revoked": CloseCode.REVOKED, "unknown": CloseCode.BAD_CREDENTIAL}

_log = logging.getLogger("paceline.server")


class Peers(Protocol):
    """Receiver of new links: `runtime.node.Node`."""

    def on_link(self, link: Link, peer: str) -> None: ...


class Links:
    """The route `/v1/link` and the open link of each device. Belongs to the event loop's thread."""

    def __init__(
        self,
        registry: Registry,
        peers: Peers,
        welcome: Callable[[], Welcome],
        *,
        emulation: Emulation | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`welcome` is called for each link, since the number of documents changes."""
        self._registry = registry
        self._peers = peers
        self._welcome = welcome
        self._emulation = emulation
        self._vocab_size = vocab_size
        self._live: dict[str, tuple[Link, Hello]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def serve(self, websocket: WebSocket) -> None:
        await serve_websocket(
            websocket,
            welcome=self._welcome(),
            authenticate=self._authenticate,
            on_link=self._admitted,
            emulation=self._emulation,
            vocab_size=self._vocab_size,
        )

    async def watch(self) -> None:
        """Close links of devices whose credential is no longer valid. Runs until cancelled."""
        with self._registry.watching() as version:
            seen, again = version(), False
            while True:
                await asyncio.sleep(WATCH_S)
                # Check twice after a change: at the first check a device may be authenticated but not yet admitted.
                try:
                    before, seen = seen, version()
                except sqlite3.Error as error:
                    _log.error("the device registry cannot be watched: %s", error)
                    continue
                if before != seen or again:
                    await self.check()
                again = before != seen

    async def check(self) -> None:
        """Authenticate every open link once more, and close those refused."""
        for device, (link, hello) in list(self._live.items()):
            if link.closed.is_set():
                del self._live[device]
                continue
            try:
                refusal = await self._authenticate(hello)
            except sqlite3.Error as error:
                _log.error("the device registry cannot be read: %s", error)
                return
            if refusal is not None:
                _log.info("the link of %s is cut: its credential holds no longer", device)
                await link.close(refusal)

    async def _authenticate(self, hello: Hello) -> CloseCode | None:
        return _REFUSALS[await asyncio.to_thread(self._registry.credential_status, hello.device, hello.credential)]

    def _admitted(self, link: Link) -> None:
        hello = link.peer
        assert isinstance(hello, Hello), "a device's first message is Hello"
        older = self._live.get(hello.device)
        self._live[hello.device] = (link, hello)
        if older is not None and not older[0].closed.is_set():
            # The older connection may be dead without having been noticed: the newest link is the device's.
            closing = asyncio.create_task(older[0].close(CloseCode.DUPLICATE_DEVICE))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._peers.on_link(link, hello.device)
