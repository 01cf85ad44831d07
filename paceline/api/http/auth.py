"""Bearer keys: authentication of requests, and the device and scopes bound to each key.

Keys come from the setting `api_keys` and from a store. A presented key is compared with all of them by digest, in
constant time. Without any key the API is open, which is accepted on a loopback address only.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, Self, get_args

from paceline.core.addresses import is_loopback
from paceline.errors import ConfigError

KEY_ID_LENGTH = 24  # hexadecimal digits: 96 bits, enough against collisions

_BOUND = re.compile(r"(?P<key>.+)=(?P<device>[A-Za-z0-9][A-Za-z0-9._-]{0,63})")


# `devices` belongs to no route: it lets a key that is bound to no device name one.
Scope = Literal["chat", "completions", "responses", "embeddings", "files", "vector_stores", "devices"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Identity:
    """The key behind a request, and its permissions.

    `device`: the one bound to the key. `key`: the key's id, which owns what it creates; empty where the API is open.
    `scopes` None: all. `name`: of a stored key, told to devices; empty for a key of the settings, and without keys.
    """

    device: str | None = None
    key: str = ""
    scopes: frozenset[str] | None = None
    name: str = ""

    def may(self, scope: Scope | None) -> bool:
        """True if the key may use a route of this scope; None: a route for any key."""
        return scope is None or self.scopes is None or scope in self.scopes


NOBODY: Final = Identity()  # who is known by no key


@dataclass(frozen=True, slots=True)
class StoredKey:
    digest: bytes  # SHA-256
    identity: Identity
    until: float | None  # s since 1970: when it expires; None: never

    @classmethod
    def of(
        cls,
        digest: bytes,
        *,
        owner: bytes | None = None,
        device: str | None = None,
        scopes: frozenset[str] | None = None,
        until: float | None = None,
        name: str = "",
    ) -> Self:
        """owner: the digest that it had first; None: this one."""
        return cls(digest, Identity(device, _id(owner or digest), scopes, name), until)


class StoredKeys(Protocol):
    """Keys that may change at any time. Raises StorageError where they cannot be known."""

    def __call__(self) -> Sequence[StoredKey]:
        """Those of this moment. Blocks after a change."""

    async def fresh(self) -> Sequence[StoredKey]:
        """The same; the event loop goes on meanwhile."""


class Keyring:
    """The keys in force: those of the settings, and those of a store that may change at any time.

    A store with any key, even an expired one, makes keys required: revoking the last key does not open the API.
    """

    def __init__(self, keys: Mapping[str, str | None], store: StoredKeys | None = None) -> None:
        """`store`: asked for every request."""
        self._configured = tuple(StoredKey.of(_digest(key), device=device) for key, device in keys.items())
        self._store = store
        self._stored: Callable[[], Sequence[StoredKey]] = store or tuple

    async def now(self) -> Self:
        """The keys of this moment, which stay as they are: no method of theirs blocks. Raises StorageError."""
        if self._store is None:
            return self
        found, kept = await self._store.fresh(), copy.copy(self)
        kept._stored = lambda: found
        return kept

    @property
    def required(self) -> bool:
        return bool(self._configured or self._stored())

    def identify(self, authorization: str | None) -> Identity | None:
        """The identity behind an `Authorization` header; None when its key is unknown or expired."""
        keys = (*self._configured, *self._stored())
        if not keys:
            return NOBODY
        found = _presented(keys, authorization)
        if found is None or (found.until is not None and time.time() >= found.until):
            return None
        return found.identity

    def expired(self, authorization: str | None) -> float | None:
        """When the key of a header expired, s since 1970; None for one that is unknown, valid or revoked."""
        found = _presented((*self._configured, *self._stored()), authorization)
        return None if found is None or not found.until or time.time() < found.until else found.until

    def name_of(self, key: str) -> str:
        """Name of a stored key by its id; empty for any other."""
        return next((each.identity.name for each in self._stored() if each.identity.key == key), "")

    def holds(self) -> bool:
        return bool(self._configured) or any(key.until is None or time.time() < key.until for key in self._stored())


def _presented(keys: Sequence[StoredKey], authorization: str | None) -> StoredKey | None:
    scheme, _, key = (authorization or "").partition(" ")
    presented = _digest(key.strip())
    found: StoredKey | None = None
    for each in keys:  # no early end: the time taken reveals nothing
        if hmac.compare_digest(each.digest, presented):
            found = each
    return found if scheme.lower() == "bearer" else None


def parse_keys(entries: Iterable[str]) -> dict[str, str | None]:
    """Parse the setting `api_keys`: each entry `KEY` or `KEY=DEVICE`. The `=` that ends a base64 key belongs to it.

    Raises ConfigError for a key that no client could send: a header carries ASCII only.
    """
    keys: dict[str, str | None] = {}
    for number, entry in enumerate(entries, 1):
        if not (entry.isascii() and entry.isprintable()):
            raise ConfigError(f"Key {number} of api_keys has characters that no header can carry: use ASCII only.")
        bound = _BOUND.fullmatch(entry)
        key, device = (bound["key"], bound["device"]) if bound else (entry, None)
        if keys.get(key, device) != device:
            raise ConfigError(f"a key in api_keys is bound to two devices, {keys[key]} and {device}")
        keys[key] = device
    return keys


def check_exposure(host: str, keyring: Keyring) -> None:
    """Raises ConfigError when other machines could send requests without a key, or no key is valid."""
    if not is_loopback(host) and not keyring.holds():
        raise ConfigError(
            f"Listening on {host} lets other machines in, so at least one key is required: make one at a server with "
            "`paceline keys create NAME`, set --api-keys or PACELINE_API_KEYS, or listen on 127.0.0.1."
        )


def key_id(key: str) -> str:
    return _id(_digest(key))


def _id(digest: bytes) -> str:
    return digest.hex()[:KEY_ID_LENGTH]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
