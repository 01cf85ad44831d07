"""Links of devices to this server: admitted by key, one per device, closed when the key holds no longer.

Keys are renewed over open links, and expire, by this server's clock alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.websockets import WebSocket

from paceline.errors import StorageError
from paceline.runtime.identity import cloud_handshake
from paceline.runtime.link.connection import Link, serve_websocket
from paceline.runtime.link.emulation import Emulation
from paceline.settings_tables import TUNING
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim, Signer
from paceline.wire.messages import Introduction

from .devices import Registry

if TYPE_CHECKING:
    from paceline.fleet import Fleet

PATH = "/v1/link"
WATCH_S = 0.5  # polling interval of the registry, and so about the longest life of a link after its revocation
HOUR_S = 3600.0
RENEW_S = 30.0  # for a device to reply when it is asked for a new key, before it is asked again
UNREAD_S = 5.0  # without the registry before links are cut: a device may have been revoked meanwhile
SLACK_S = 60.0  # a key stored further in the future was stored before the clock was set back: renewed once a link

_log = logging.getLogger("paceline.server")


@dataclass(slots=True)
class _Live:
    link: Link
    renewed_at: float | None = None  # s since 1970, of its key; None: not read yet
    asked_at: float | None = None  # s, monotonic: when it was last asked for a new key
    was_idle: bool = False  # at the last look, of a server that drains


@dataclass(eq=False)
class Links:
    """The route `/v1/link` and the open link of each device. Belongs to the event loop's thread."""

    registry: Registry
    on_link: Callable[[Link, str], None]  # told of each new link with its device
    introduce: Callable[[], Introduction]  # called for each link, since the number of documents changes
    _: KW_ONLY
    key: Signer  # the server's
    credential_hours: float = TUNING.credential_hours  # life of a device's key, renewed when half of it is over
    emulation: Emulation | None = None
    vocab_size: int | None = None
    fleet: Fleet | None = None

    def __post_init__(self) -> None:
        self.has_devices = self.registry.has_devices()  # as the registry was read last
        self.is_leaving: Callable[[], bool] = bool  # this server drains, and others take its devices
        self._live: dict[str, _Live] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._unread = False  # a link has come up since the registry was last read
        self._failing_since: float | None = None  # s, monotonic: the registry could not be read from then on

    def has(self, device: str | None) -> bool:
        """True if this device is linked here; any, without a name."""
        live = self._live.values() if device is None else filter(None, [self._live.get(device)])
        return any(not each.link.closed.is_set() for each in live)

    async def serve(self, websocket: WebSocket) -> None:
        if self.is_leaving():
            await websocket.send_denial_response(Response(status_code=503))
            return
        await serve_websocket(
            websocket,
            handshake=cloud_handshake(self.introduce(), self.key),
            authenticate=self._authenticate,
            keep_key=self._keep_key,
            on_link=self._admitted,
            emulation=self.emulation,
            vocab_size=self.vocab_size,
        )

    async def watch(self) -> None:
        """Close links of devices whose key holds no longer, and have keys renewed. Runs until cancelled."""
        with self.registry.watching() as version:
            seen: int | None = None
            again = False
            while True:
                await asyncio.sleep(WATCH_S)
                # Check twice after a change: at the first check a device may be authenticated but not yet admitted.
                try:
                    before, seen = seen, version()
                except StorageError as error:
                    await self._failed(error)
                    continue
                if before != seen or again or self._unread or self._failing_since is not None:
                    self._unread = False
                    await self.check()
                again = before != seen
                await self.renew()
                if self.is_leaving():
                    self._let_go()

    def _let_go(self) -> None:
        """Send devices to the other servers, whose answers have ended or may be between two of their sessions."""
        for live in self._live.values():
            if live.link.is_idle and live.was_idle and live.link.accepting:
                live.link.drain()
            live.was_idle = live.link.is_idle

    async def check(self) -> None:
        """Look up the device of every open link once more, and close those that may not stay."""
        try:
            self.has_devices = await asyncio.to_thread(self.registry.has_devices)
            links = dict(self._live)
            present = {device: live.link.renewal.present for device, live in links.items()}
            standings = await asyncio.to_thread(self.registry.standings, present)
            for device, live in links.items():
                if live.link.closed.is_set():
                    self._forget(device, live)
                    continue
                refusal, live.renewed_at = standings[device]
                if refusal is not None:
                    _log.info("the link of %s is cut: its key holds no longer", device)
                    await live.link.close(refusal)
        except StorageError as error:
            self._unread = True  # to be read again
            await self._failed(error)
            return
        self._failing_since = None

    async def _failed(self, error: StorageError) -> None:
        """The registry could not be read: after a while nobody stays on the word of what it said before."""
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            _log.error("the device registry cannot be read: %s", error)
            self._failing_since = now
        elif now - self._failing_since >= UNREAD_S and self._live:
            _log.error("every link is cut, since the device registry cannot be read: %s", error)
            for live in list(self._live.values()):
                await live.link.close(CloseCode.INTERNAL_ERROR)

    async def renew(self) -> None:
        """Ask devices whose keys are at half of their life for new ones; close the links of those that have expired
        while a device was asked and did not reply."""
        life_s = self.credential_hours * HOUR_S
        for device, live in list(self._live.items()):
            if live.link.closed.is_set() or live.renewed_at is None:
                continue
            age = time.time() - live.renewed_at
            clock = asyncio.get_running_loop().time()
            if -SLACK_S < age < life_s / 2:
                live.asked_at = None
            elif live.asked_at is None:
                live.asked_at = clock
                live.link.renew_key()
            elif age > 0 and clock - live.asked_at >= RENEW_S:
                if live.link.renewal.awaited and age >= life_s:
                    _log.warning("the link of %s is cut: its key has expired, and it sends no new one", device)
                    await live.link.close(CloseCode.NOT_RENEWED)
                else:
                    live.asked_at = clock
                    live.link.renew_key()

    async def _authenticate(self, claim: Claim) -> bytes | CloseCode:
        found = await asyncio.to_thread(self.registry.recognise, claim)
        if found is CloseCode.KEY_REPLACED:
            _log.warning(
                "%s was refused: it showed a key that has been replaced since. Its state directory comes from a "
                "backup, or somebody has a copy of it; `paceline devices revoke %s` locks both out.",
                claim.device,
                claim.device,
            )
        return found

    async def _keep_key(self, device: str, present: bytes, new: bytes) -> bool:
        kept = await asyncio.to_thread(self.registry.renew, device, present, new)
        _log.info("the key of %s %s", device, "was renewed" if kept else "was not renewed: it holds no longer")
        return kept

    def _admitted(self, link: Link) -> None:
        older = self._live.get(link.device)
        self._live[link.device] = _Live(link)
        self._unread = True
        if older is not None and not older.link.closed.is_set():
            # The older connection may be dead without having been noticed: the newest link is the device's.
            closing = asyncio.create_task(older.link.close(CloseCode.DUPLICATE_DEVICE))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self.on_link(link, link.device)
        if self.fleet is not None:
            self.fleet.linked(link.device)
            watching = asyncio.create_task(self._unlinked(link, self.fleet))
            self._closing.add(watching)
            watching.add_done_callback(self._closing.discard)

    async def _unlinked(self, link: Link, fleet: Fleet) -> None:
        await link.closed.wait()
        live = self._live.get(link.device)
        if live is None or live.link is link:  # not another one, that came up meanwhile
            fleet.linked(link.device, is_here=False)

    def _forget(self, device: str, live: _Live) -> None:
        if self._live.get(device) is live:  # likewise
            del self._live[device]
