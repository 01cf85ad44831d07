"""Registry of devices that may link, in a file that the server and `paceline devices` share.

Adding a device by name returns a one-time code to type at the device, by which it enrols a public key. Nothing in the
file lets anyone in: it has public keys and, of a code, what it can be recognised by. All times are of this machine's
clock. Methods block for a disk access and may be called from any thread or process.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigError, RequestError
from paceline.runtime.identity import PrivateKey, verify
from paceline.settings_tables import TUNING
from paceline.sql import Home, SqlConnection, place_in
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim, Signer
from paceline.wire.identity import (
    ALPHABET,
    BY_CODE,
    BY_DEVICE,
    GROUP_LETTERS,
    GROUPS,
    EnrolmentRequest,
    answer_bytes,
    answer_mac,
    code_secrets,
)

from .state import StateTables

STORE = "devices"
CODE_LIFE_S = 600.0
MAX_TRIES = 5  # wrong proofs until a code is void
DAY_S = 86_400.0
NAMES = 1000  # looked up by one statement
Role = Literal["device", "stage"]  # of an application's device, or of a stage of this server's model
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCHEMA = (
    """CREATE TABLE identities (
        name TEXT PRIMARY KEY,
        key BLOB NOT NULL,  -- Ed25519 public key
        former_key BLOB,  -- the one before the last renewal, to recognise copies by
        enrolled_at REAL NOT NULL,  -- s since 1970
        renewed_at REAL NOT NULL,  -- when `key` was stored
        revoked_at REAL,
        role TEXT NOT NULL DEFAULT 'device'
    ) WITHOUT ROWID""",
    """CREATE TABLE enrolment_codes (
        name TEXT PRIMARY KEY,  -- one open code per device
        id TEXT NOT NULL UNIQUE,  -- its first group, by which the code is looked up
        key BLOB NOT NULL,  -- public key derived from the rest: 59 bits, valid for ten minutes
        mac_key BLOB NOT NULL,  -- likewise, by which the server proves that it issued the code
        expires_at REAL NOT NULL,
        tries INTEGER NOT NULL,
        role TEXT NOT NULL DEFAULT 'device'
    ) WITHOUT ROWID""",
)


@dataclass(frozen=True, slots=True)
class Device:
    """A device as `paceline devices list` shows it.

    `waiting`: its code has not been used yet.
    """

    name: str
    state: Literal["waiting", "enrolled", "revoked"]
    since: float  # s since 1970; of a waiting device, the end of its code's validity
    role: Role = "device"


@dataclass(frozen=True, slots=True)
class EnrolmentAnswer:
    """What an enrolled device is told. The server's key is authenticated by `mac`, and proved by `signature`."""

    device: str
    server_key: bytes
    mac: bytes
    signature: bytes


class Registry:
    def __init__(self, state: Path | Home, *, away_days: float = TUNING.device_days) -> None:
        """Open the registry, creating it if needed. Raises ConfigError when it cannot be used.

        away_days: a device that has not renewed its key for so long must enrol again; 0: never.
        """
        self._tables = StateTables(place_in(state, STORE, "a device registry"), _SCHEMA, "device registry")
        self._away_s = away_days * DAY_S

    def watching(self) -> AbstractContextManager[Callable[[], int]]:
        """A function whose number changes after every change of the file. See `StateTables.watching`."""
        changes = count()
        return self._tables.watching(lambda _: next(changes))

    # ---- the owner's side -------------------------------------------------------------------------------------------
    def add(self, name: str, role: Role = "device") -> str:
        """Issue a one-time code for a device, or a stage, of this name, replacing an unused one.

        An enrolled name may be added again: its key stays valid until the new code is used. Raises ConfigError for an
        invalid name.
        """
        check_name(name)
        groups = ["".join(secrets.choice(ALPHABET) for _ in range(GROUP_LETTERS)) for _ in range(GROUPS)]
        code = "-".join(groups)
        derived = code_secrets(code)
        key, expires_at = PrivateKey(derived.seed).public_key, time.time() + CODE_LIFE_S
        with self._tables.changing() as rows:
            rows.execute("DELETE FROM enrolment_codes WHERE expires_at <= ?", (time.time(),))
            rows.execute(
                "INSERT INTO enrolment_codes VALUES (?, ?, ?, ?, ?, 0, ?) ON CONFLICT (name) DO UPDATE SET "
                "id = excluded.id, key = excluded.key, mac_key = excluded.mac_key, expires_at = excluded.expires_at, "
                "tries = 0, role = excluded.role",
                (name, derived.id, key, derived.mac_key, expires_at, role),
            )
        return code

    def devices(self) -> list[Device]:
        with self._tables.reading() as rows:
            devices = {row[0]: Device(*row) for row in rows.execute(_DEVICES)}
            for name, expires, role in rows.execute(
                "SELECT name, expires_at, role FROM enrolment_codes WHERE expires_at > ? AND tries < ?",
                (time.time(), MAX_TRIES),
            ):
                if name not in devices or devices[name].state != "enrolled":
                    devices[name] = Device(name, "waiting", expires, role)
        return [devices[name] for name in sorted(devices)]

    def has_devices(self) -> bool:
        with self._tables.reading() as rows:
            known = "SELECT 1 FROM identities WHERE role = 'device' AND revoked_at IS NULL"
            return rows.execute(known).fetchone() is not None

    def revoke(self, name: str) -> bool:
        """Invalidate the device's key and its unused code. False when there is no such device."""
        with self._tables.changing() as rows:
            codes = rows.execute("DELETE FROM enrolment_codes WHERE name = ?", (name,)).rowcount
            known = rows.execute(
                "UPDATE identities SET revoked_at = coalesce(revoked_at, ?) WHERE name = ?", (time.time(), name)
            ).rowcount
        return codes + known > 0

    # ---- the device's side ------------------------------------------------------------------------------------------
    def enrol(self, request: EnrolmentRequest, server_key: Signer) -> EnrolmentAnswer:
        """Enrol the key of a device that proves a code, which then holds for that key alone: an answer that was lost is
        asked for again. Raises RequestError (401) for a false proof.

        A request for an unknown code writes nothing; one for a known code at most MAX_TRIES times.
        """
        if self._may_enrol(request) and verify(request.key, request.key_signature, request.signed(BY_DEVICE)):
            with self._tables.changing() as rows:  # one try at a time: of two with the right code the first wins
                row = _code(rows, request)
                if row is not None and verify(row[1], request.code_signature, request.signed(BY_CODE)):
                    name, _, mac_key, role = row
                    now = time.time()
                    rows.execute("UPDATE enrolment_codes SET tries = ? WHERE name = ?", (MAX_TRIES, name))
                    rows.execute(
                        "INSERT INTO identities VALUES (?, ?, NULL, ?, ?, NULL, ?) ON CONFLICT (name) DO UPDATE SET "
                        "key = excluded.key, former_key = NULL, enrolled_at = excluded.enrolled_at, "
                        "renewed_at = excluded.renewed_at, revoked_at = NULL, role = excluded.role",
                        (name, request.key, now, now, role),
                    )
                    answer = answer_bytes(request, name, server_key.public_key)
                    return EnrolmentAnswer(
                        name, server_key.public_key, answer_mac(mac_key, answer), server_key.sign(answer)
                    )
                if row is not None:
                    rows.execute("UPDATE enrolment_codes SET tries = tries + 1 WHERE name = ?", (row[0],))
        raise RequestError(
            "This enrolment code does not hold: it is mistyped, used, older than ten minutes, or was tried too often. "
            "Get a new one with `paceline devices add`.",
            status=401,
            code="invalid_enrolment_code",
            param="code_id",
        )

    def recognise(self, claim: Claim, role: Role = "device") -> bytes | CloseCode:
        """The public key that proves a device's claim, or why it may not link. A key serves the role that it was
        enrolled for. Keys of stages are not renewed, and stages are never away too long."""
        with self._tables.reading() as rows:
            row = rows.execute(
                "SELECT key, former_key, renewed_at, revoked_at FROM identities WHERE name = ? AND role = ?",
                (claim.device, role),
            ).fetchone()
        key, former_key, renewed_at, revoked_at = row or (None, None, 0.0, None)
        if key is not None and claim.proves(key):
            if revoked_at is not None:
                return CloseCode.REVOKED
            away = role == "device" and self._away_s > 0 and time.time() - renewed_at > self._away_s
            return CloseCode.AWAY_TOO_LONG if away else bytes(key)
        if former_key is not None and claim.proves(former_key):
            return CloseCode.KEY_REPLACED
        return CloseCode.BAD_CREDENTIAL

    def standings(self, present: Mapping[str, bytes]) -> dict[str, tuple[CloseCode | None, float]]:
        """Of devices with the keys by which their links were admitted: (None if the link may stay, when the device's
        key was stored).

        The key before the last renewal may stay: the renewal goes over that very link.
        """
        unknown: tuple[CloseCode | None, float] = CloseCode.BAD_CREDENTIAL, 0.0
        found = dict.fromkeys(present, unknown)
        names = [*present]
        with self._tables.reading() as rows:
            for start in range(0, len(names), NAMES):  # few statements: every change has every link looked up
                part = names[start : start + NAMES]
                marks = ", ".join("?" * len(part))
                for name, key, former, renewed, revoked in rows.execute(
                    f"SELECT name, key, former_key, renewed_at, revoked_at FROM identities WHERE name IN ({marks})",
                    part,
                ):
                    if present[name] in (key, former):
                        found[name] = (None if revoked is None else CloseCode.REVOKED), renewed
        return found

    def renew(self, device: str, present: bytes, new: bytes) -> bool:
        """Replace a device's key. False when the present one does not hold any more.

        A clock that has been set back does not make the new key look older than the present one.
        """
        now = time.time()
        with self._tables.changing() as rows:
            changed = rows.execute(
                "UPDATE identities SET key = ?, former_key = key, renewed_at = CASE WHEN renewed_at > ? THEN "
                "renewed_at ELSE ? END WHERE name = ? AND key = ? AND revoked_at IS NULL",
                (new, now, now, device, present),
            ).rowcount
        return changed > 0

    # ---- common -----------------------------------------------------------------------------------------------------
    def _may_enrol(self, request: EnrolmentRequest) -> bool:
        with self._tables.reading() as rows:
            return _code(rows, request) is not None


def _code(rows: SqlConnection, request: EnrolmentRequest) -> Sequence[Any] | None:
    """The request's code, if it may still be used: by anybody, or again by the key that it has enrolled."""
    found: Sequence[Any] | None = rows.execute(_CODE, (request.code_id, time.time(), MAX_TRIES, request.key)).fetchone()
    return found


_CODE = """SELECT name, key, mac_key, role FROM enrolment_codes AS codes WHERE id = ? AND expires_at > ? AND (
    tries < ? OR EXISTS (SELECT 1 FROM identities WHERE name = codes.name AND key = ? AND revoked_at IS NULL))"""
_DEVICES = """SELECT name, CASE WHEN revoked_at IS NULL THEN 'enrolled' ELSE 'revoked' END,
    coalesce(revoked_at, enrolled_at), role FROM identities"""


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == "cloud":
        raise ConfigError(
            f"{name[:80]!r} cannot be a device's name: use up to 64 letters, digits, dots, dashes or underscores."
        )
