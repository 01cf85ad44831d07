"""API keys of applications: made, rotated and revoked by command, effective in a running server at once.

Only a key's SHA-256 is stored. A slow hash protects passwords that people choose; a key here is 256 random bits, which
cannot be guessed however fast the hash, and the hash is computed for every request.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.api.http.auth import SCOPES, StoredKey
from paceline.core.side import MAX_NAME, is_name
from paceline.errors import ConfigError, StorageError
from paceline.secret_files import write_private
from paceline.sql import DuplicateRow, Home, SqlConnection, place_in

from .devices import check_name
from .state import StateTables, WatchedRows

STORE = "keys"
REQUIRED = "keys-required"  # a file beside it: there has been a key
MARK = "sk-pl-"  # `sk`, which some clients require, and `pl`, by which secret scanners recognise a leaked key
SHOWN = len(MARK) + 6  # characters of a key shown in lists: 36 of its 256 bits
DAY_S = 86_400.0
_SCHEMA = (
    """CREATE TABLE keys (
        name TEXT NOT NULL,
        prefix TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,  -- sha256
        owner BLOB NOT NULL,  -- the digest that it began with: what it makes stays its own when it is rotated
        scopes TEXT,  -- separated by spaces; NULL: all
        device TEXT,  -- the device that joins its answers; NULL: the one that a request names
        created_at REAL NOT NULL,  -- s since 1970
        expires_at REAL,
        revoked_at REAL
    )""",
    "CREATE UNIQUE INDEX names ON keys (name) WHERE revoked_at IS NULL",
)


@dataclass(frozen=True, slots=True)
class Key:
    """A key as `paceline keys list` shows it. Times are s since 1970."""

    name: str
    prefix: str
    scopes: tuple[str, ...] | None  # None: all
    device: str | None
    created_at: float
    expires_at: float | None
    state: Literal["valid", "expired", "revoked"]


class Keys:
    def __init__(self, state: Path | Home) -> None:
        """Open the store of keys, creating it if needed. Raises ConfigError when it cannot be used."""
        self._tables = StateTables(place_in(state, STORE, "a file of keys"), _SCHEMA, "file of keys")
        self._required = state / REQUIRED if isinstance(state, Path) else None  # a database does not get lost alone

    # ---- the owner's side -------------------------------------------------------------------------------------------
    def create(
        self, name: str, *, scopes: Collection[str] = (), device: str | None = None, days: float | None = None
    ) -> str:
        """Create a key and return it; it cannot be read again. `scopes` empty: all; `days` None: it does not expire.

        Raises ConfigError for a name in use, an unknown scope, or an invalid device name.
        """
        if not is_name(name):
            raise ConfigError(f"{name[:80]!r} cannot be a key's name: use up to {MAX_NAME} printable characters.")
        for scope in scopes:
            if scope not in SCOPES:
                raise ConfigError(f"Unknown scope {scope[:80]!r}; known: {', '.join(SCOPES)}.")
        if device is not None:
            check_name(device)
        expires = _expiry(days)
        kept = " ".join(scope for scope in SCOPES if scope in scopes) or None
        key, digest = _drawn()
        self._require()
        taken = f"There is a key {name} already: revoke it first, or choose another name."
        with _unique(taken), self._tables.changing() as rows:
            rows.execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                (name, key[:SHOWN], digest, digest, kept, device, time.time(), expires),
            )
        return key

    def all(self) -> list[Key]:
        """List all keys ever created, oldest first."""
        with self._tables.reading() as rows:
            found = rows.execute(
                "SELECT name, prefix, scopes, device, created_at, expires_at, revoked_at FROM keys ORDER BY created_at"
            ).fetchall()
        now = time.time()
        return [
            Key(
                name,
                prefix,
                None if scopes is None else tuple(scopes.split()),
                device,
                created,
                expires,
                "revoked" if revoked is not None else "expired" if expires is not None and expires <= now else "valid",
            )
            for name, prefix, scopes, device, created, expires, revoked in found
        ]

    def revoke(self, name: str) -> bool:
        """Revoke a key by name or prefix, from the next request on. False when there is no such valid key."""
        with self._tables.changing() as rows:
            changed = rows.execute(
                "UPDATE keys SET revoked_at = ? WHERE (name = ? OR prefix = ?) AND revoked_at IS NULL",
                (time.time(), name, name),
            ).rowcount
        return changed > 0

    def extend(self, name: str, days: float | None) -> bool:
        """Let a key, also an expired one, hold for so many days from now; None: until it is revoked. What it has made
        stays its own. False when there is no such key, or it was revoked."""
        with self._tables.changing() as rows:
            changed = rows.execute(
                "UPDATE keys SET expires_at = ? WHERE (name = ? OR prefix = ?) AND revoked_at IS NULL",
                (_expiry(days), name, name),
            ).rowcount
        return changed > 0

    def rotate(self, name: str) -> str | None:
        """Return another secret for a key, whose earlier one is refused from the next request on. What the key has made
        stays its own. A revoked key is valid again by it. None where there is no such key.

        Raises ConfigError for a revoked key while another has its name.
        """
        key, digest = _drawn()
        with _unique("Another key has its name now: revoke that first."), self._tables.changing() as rows:
            found = rows.execute(
                "SELECT digest FROM keys WHERE name = ? OR prefix = ? "
                "ORDER BY revoked_at IS NULL DESC, created_at DESC",
                (name, name),
            ).fetchone()
            if found is None:
                return None
            rows.execute(
                "UPDATE keys SET digest = ?, prefix = ?, revoked_at = NULL WHERE digest = ?",
                (digest, key[:SHOWN], found[0]),
            )
        return key

    # ---- the server's side ------------------------------------------------------------------------------------------
    @contextmanager
    def current(self) -> Iterator[WatchedRows[Sequence[StoredKey]]]:
        """The current keys, read again only after the file has changed.

        They raise StorageError, as this does, while the file cannot be read, and for one without a key where there have
        been some: the file may have been lost, and must not open the server.
        """
        with self._tables.watching(self._known) as keys:
            keys()
            yield keys

    def _known(self, rows: SqlConnection) -> Sequence[StoredKey]:
        found = tuple(_stored(row) for row in rows.execute(_CURRENT))
        if found:  # in a copy that came here without the file beside it, perhaps
            self._require()
        elif self._required is not None and self._required.exists():
            raise StorageError(
                f"{self._tables.place.name} has no keys, though there have been some: put it back from a copy, or make "
                f"new ones with `paceline keys create NAME`. To serve without keys, remove {self._required}."
            )
        return found

    def _require(self) -> None:
        if self._required is not None and not self._required.exists():
            write_private(self._required, b"Keys are required here, whatever keys.sqlite holds.\n")


# A revoked key expires in 1970: with the moment of revocation it would be valid again if the clock were set back.
_CURRENT = (
    "SELECT digest, owner, name, scopes, device, CASE WHEN revoked_at IS NULL THEN expires_at ELSE 0 END FROM keys"
)


@contextmanager
def _unique(otherwise: str) -> Iterator[None]:
    try:
        yield
    except DuplicateRow:
        raise ConfigError(otherwise) from None


def _drawn() -> tuple[str, bytes]:
    """A new key and its digest."""
    key = MARK + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).digest()


def _expiry(days: float | None) -> float | None:
    """s since 1970. Raises ConfigError."""
    if days is None:
        return None
    if not 0 < days <= 36_500:
        raise ConfigError(f"A key cannot expire after {days:g} days: give a number above 0, 36500 at most.")
    return time.time() + days * DAY_S


def _stored(row: tuple[bytes, bytes, str, str | None, str | None, float | None]) -> StoredKey:
    digest, owner, name, scopes, device, until = row
    known = None if scopes is None else frozenset(scopes.split())
    return StoredKey.of(digest, owner=owner, device=device, scopes=known, until=until, name=name)
