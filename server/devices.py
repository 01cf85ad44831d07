"""Registry of devices that may link, in a file that the server and `paceline devices` share.

Adding a device by name returns a one-time code to type at the device, which exchanges it for a credential. Only hashes
of both are stored. Methods block for a disk access and may be called from any thread or process.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError, RequestError

from .state import StateFile

FILE = "devices.sqlite"
CODE_LIFE_S = 600.0
MAX_TRIES = 5  # wrong secrets until a code is void
ALPHABET = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"  # no 0 O 1 I L, which look alike
_GROUP = 4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS devices (
    name TEXT PRIMARY KEY,
    credential BLOB NOT NULL,  -- sha256
    enrolled_at REAL NOT NULL,  -- s since 1970
    revoked_at REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS codes (
    name TEXT PRIMARY KEY,  -- one open code per device
    id TEXT NOT NULL UNIQUE,  -- its first group, by which the code is looked up
    secret BLOB NOT NULL,  -- sha256 of the rest: 59 bits, valid for ten minutes
    expires_at REAL NOT NULL,
    tries INTEGER NOT NULL
) WITHOUT ROWID;
"""

CredentialStatus = Literal["admitted", "revoked", "unknown"]


@dataclass(frozen=True, slots=True)
class Device:
    """A device as `paceline devices list` shows it. `waiting`: its code has not been used yet."""

    name: str
    state: Literal["waiting", "enrolled", "revoked"]
    since: float  # s since 1970; of a waiting device, the end of its code's validity


class Registry:
    """The devices of one server."""

    def __init__(self, state_dir: Path, *, now: Callable[[], float] = time.time) -> None:
        """Open the registry, creating its file if needed. Raises ConfigError when it cannot be used."""
        self._file = StateFile(state_dir / FILE, _SCHEMA, "device registry")
        self.path = self._file.path
        self.watching = self._file.watching
        self._now = now

    # ---- the owner's side -------------------------------------------------------------------------------------------
    def add(self, name: str) -> str:
        """Issue a one-time code for a device of this name, replacing an unused one.

        An enrolled name may be added again: its credential stays valid until the new code is used. Raises ConfigError
        for an invalid name.
        """
        check_name(name)
        groups = ["".join(secrets.choice(ALPHABET) for _ in range(_GROUP)) for _ in range(4)]
        with self._file.changing() as rows:
            rows.execute("DELETE FROM codes WHERE expires_at <= ?", (self._now(),))
            rows.execute(
                "INSERT OR REPLACE INTO codes VALUES (?, ?, ?, ?, 0)",
                (name, groups[0], _digest("".join(groups[1:])), self._now() + CODE_LIFE_S),
            )
        return "-".join(groups)

    def devices(self) -> list[Device]:
        """List all devices by name."""
        with self._file.changing() as rows:
            devices = {
                name: Device(
                    name, "enrolled" if revoked is None else "revoked", enrolled if revoked is None else revoked
                )
                for name, enrolled, revoked in rows.execute("SELECT name, enrolled_at, revoked_at FROM devices")
            }
            for name, expires in rows.execute(
                "SELECT name, expires_at FROM codes WHERE expires_at > ? AND tries < ?", (self._now(), MAX_TRIES)
            ):
                if name not in devices or devices[name].state == "revoked":
                    devices[name] = Device(name, "waiting", expires)
        return [devices[name] for name in sorted(devices)]

    def revoke(self, name: str) -> bool:
        """Invalidate the device's credential and its unused code. False when there is no such device."""
        with self._file.changing() as rows:
            codes = rows.execute("DELETE FROM codes WHERE name = ?", (name,)).rowcount
            known = rows.execute(
                "UPDATE devices SET revoked_at = coalesce(revoked_at, ?) WHERE name = ?", (self._now(), name)
            ).rowcount
        return codes + known > 0

    # ---- the device's side ------------------------------------------------------------------------------------------
    def enrol(self, code: str) -> tuple[str, str]:
        """Exchange a code, which is used up, for (name, credential). Raises RequestError (401) for an invalid one."""
        groups = normalised(code)
        credential = secrets.token_urlsafe(32)
        with self._file.changing() as rows:
            row = rows.execute("SELECT name, secret, expires_at, tries FROM codes WHERE id = ?", (groups[:_GROUP],))
            name, secret, expires_at, tries = row.fetchone() or (None, b"", 0.0, 0)
            right = hmac.compare_digest(_digest(groups[_GROUP:]), secret or bytes(32))
            if name is not None and right and tries < MAX_TRIES and self._now() < expires_at:
                rows.execute("DELETE FROM codes WHERE name = ?", (name,))
                rows.execute(
                    "INSERT OR REPLACE INTO devices VALUES (?, ?, ?, NULL)", (name, _digest(credential), self._now())
                )
                return name, credential
            rows.execute("UPDATE codes SET tries = tries + 1 WHERE name IS ?", (name,))
        raise RequestError(
            "This enrolment code does not hold: it is mistyped, used, older than ten minutes, or was tried too often. "
            "Get a new one with `paceline devices add`.",
            status=401,
            code="invalid_enrolment_code",
            param="code",
        )

    def credential_status(self, name: str, credential: str) -> CredentialStatus:
        """Check a device's credential. `unknown`: not the credential of this name, or no such name."""
        with self._file.reading() as rows:
            row = rows.execute("SELECT credential, revoked_at FROM devices WHERE name = ?", (name,)).fetchone()
        stored, revoked_at = row or (bytes(32), None)
        if not hmac.compare_digest(_digest(credential), stored) or row is None:
            return "unknown"
        return "admitted" if revoked_at is None else "revoked"


def check_name(name: str) -> None:
    """Raise ConfigError for an invalid device name."""
    if not _NAME.fullmatch(name) or name == "cloud":
        raise ConfigError(
            f"{name[:80]!r} cannot be a device's name: use up to 64 letters, digits, dots, dashes or underscores."
        )


def normalised(code: str) -> str:
    """Normalise a typed code: upper case, no spaces or dashes."""
    return re.sub(r"[\s-]", "", code[:64]).upper()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
