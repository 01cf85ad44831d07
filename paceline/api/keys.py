"""Bearer keys: who may ask, and which device joins their answers.

Keys are compared by digest, all of them, in constant time. Without any key the surface is open, which is accepted on a
loopback address only.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import ConfigError
from paceline.settings import is_loopback

KEY_ID_LENGTH = 24  # hexadecimal digits: 96 bits, of which nobody makes two alike

_BOUND = re.compile(r"(?P<key>.+)=(?P<device>[A-Za-z0-9][A-Za-z0-9._-]{0,63})")


Scope = Literal["chat", "completions", "responses", "embeddings", "files", "vector_stores"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks, and what for.

    `device` is the one bound to the key, None for a key that may use any. `key` tells keys apart: what one made,
    another does not find; empty where the surface is open to all. `scopes` None: everything.
    """

    device: str | None = None
    key: str = ""
    scopes: frozenset[str] | None = None

    def may(self, scope: Scope | None) -> bool:
        """Whether a route of this scope is open to the key; None is a route for any."""
        return scope is None or self.scopes is None or scope in self.scopes


class Keyring:
    """The keys in force. Keeps digests only."""

    def __init__(self, keys: Mapping[str, str | None]) -> None:
        self._holders = [
            (digest, Identity(device, digest.hex()[:KEY_ID_LENGTH]))
            for digest, device in ((_digest(key), device) for key, device in keys.items())
        ]

    @property
    def required(self) -> bool:
        return bool(self._holders)

    def identify(self, authorization: str | None) -> Identity | None:
        """Whose `Authorization` header this is; None when it is nobody's."""
        if not self._holders:
            return Identity()
        scheme, _, key = (authorization or "").partition(" ")
        presented = _digest(key.strip())
        found: Identity | None = None
        for digest, identity in self._holders:  # no early end: the time tells nothing
            if hmac.compare_digest(digest, presented):
                found = identity
        return found if scheme.lower() == "bearer" else None


def parse_keys(entries: Iterable[str]) -> dict[str, str | None]:
    """`KEY` or `KEY=DEVICE`, as the setting `api_keys` has them. The `=` that ends a base64 key belongs to the key."""
    keys: dict[str, str | None] = {}
    for entry in entries:
        bound = _BOUND.fullmatch(entry)
        key, device = (bound["key"], bound["device"]) if bound else (entry, None)
        if keys.get(key, device) != device:
            raise ConfigError(f"a key in api_keys is bound to two devices, {keys[key]} and {device}")
        keys[key] = device
    return keys


def check_exposure(host: str, keys: Mapping[str, str | None]) -> None:
    """Raises ConfigError when others than this machine could ask without a key."""
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"Listening on {host} lets other machines in, so at least one key is required: "
            "set --api-keys or PACELINE_API_KEYS, or listen on 127.0.0.1."
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
