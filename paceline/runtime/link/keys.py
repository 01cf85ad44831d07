"""The link machine's effects on keys: they read or write a registry or a file, and so take time.

On a cloud a device's claim is checked and its new key kept; on a device a new key is made and the former dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from paceline.errors import PacelineError
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Authenticate, Effect, KeepKey, KeyEffect, MakeKey, SettleKey
from paceline.wire.identity.renewal import CloudRenewal, DeviceRenewal
from paceline.wire.link import LinkMachine
from paceline.wire.signing import Claim, Signer

log = logging.getLogger("paceline.link")

# The public key that proves the claim, or why it is refused; never raises for a false claim.
Authenticator = Callable[[Claim], Awaitable[bytes | CloseCode]]
# (device, its present public key, its new one) -> whether the new one is stored and the present one void.
KeyKeeper = Callable[[str, bytes, bytes], Awaitable[bool]]


class KeyStore(Protocol):
    """A device's keys for one cloud. Methods raise PacelineError when nothing can be stored."""

    async def make_key(self) -> Signer:
        """A key beside the present one, stored. The same one again until `settle`."""

    async def settle(self, public_key: bytes) -> None:
        """Drop all keys but this one."""


class KeyWork:
    """Executes effects on keys for one link."""

    def __init__(self, authenticate: Authenticator | None, keep_key: KeyKeeper | None, store: KeyStore | None) -> None:
        self._authenticate = authenticate
        self._keep_key = keep_key
        self._store = store

    async def run(self, effect: KeyEffect, machine: LinkMachine) -> list[Effect]:
        """Execute one effect, and return what the machine wants then. A renewal that fails is logged: the present key
        stays valid, and the cloud asks again."""
        if isinstance(effect, Authenticate):
            admitted = await self._admit(effect.claim)
            return machine.authenticated(admitted, asyncio.get_running_loop().time())
        try:
            return await self._renew(effect, machine)
        except PacelineError as error:
            log.error("this device's key cannot be renewed: %s", error)
        except Exception:
            log.exception("a device's key could not be renewed")
        return []

    async def _admit(self, claim: Claim) -> bytes | CloseCode:
        if self._authenticate is None:
            return CloseCode.BAD_CREDENTIAL
        try:
            return await self._authenticate(claim)
        except Exception:
            log.exception("a device's claim could not be checked")
            return CloseCode.INTERNAL_ERROR

    async def _renew(self, effect: MakeKey | KeepKey | SettleKey, machine: LinkMachine) -> list[Effect]:
        renewal = machine.renewal
        match effect:
            case MakeKey() if self._store is not None and isinstance(renewal, DeviceRenewal):
                return renewal.offer(await self._store.make_key())
            case SettleKey(key) if self._store is not None:
                await self._store.settle(key)
            case KeepKey(device, present, new) if self._keep_key is not None and isinstance(renewal, CloudRenewal):
                if await self._keep_key(device, present, new):
                    return renewal.kept(new)
        return []
