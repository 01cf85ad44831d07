"""The key of a store: in the keyring of the operating system, or in a file of mode 0600 beside the store.

The file beside the store (`docs.key` for the folder `docs`) always exists: it holds the key, or says under which name
the keyring has it, so that a keyring that is locked or absent is never mistaken for a store without a key. Where the
folder is a mount point the file lies in it, since what is beside it may be on a disk that is thrown away. Not handled:
an attacker who acts as this user.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import ConfigError
from paceline.secret_files import make_folder, read_private, write_private

KEY_BYTES = 32
INSIDE = "documents.key"  # in the folder itself, where that is a mount point
SERVICE = "paceline documents"  # in the keyring
_log = logging.getLogger("paceline.rag")


class Keyring(Protocol):
    """What is used of the library `keyring`."""

    def get_password(self, service: str, username: str) -> str | None: ...

    def set_password(self, service: str, username: str, password: str) -> None: ...


def system_keyring() -> Keyring | None:
    """The keyring of the operating system; None without the library, or where it has only makeshifts."""
    try:
        import keyring
    except ImportError:
        return None
    backend = keyring.get_keyring()
    # 1 and above are those that the library recommends; below are files in plain text, and the one that always fails.
    found: Keyring = backend
    return found if backend.priority >= 1 else None


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The key of the store in one folder. Methods raise ConfigError with what to do."""

    store: Path
    what: str = "documents"  # as messages call what is sealed with it
    anew: str = "choose another folder and add them again"  # what to do without the key, likewise
    find_keyring: Callable[[], Keyring | None] = lambda: system_keyring()  # looked up at the call

    @property
    def path(self) -> Path:
        """The file that holds the key or names its entry in the keyring."""
        inside = self.store / INSIDE
        if inside.exists() or os.path.ismount(self.store):
            return inside
        return self.store.parent / f"{self.store.name}.key"

    def read(self) -> bytes | None:
        """The key; None where there is no file."""
        content = read_private(self.path, otherwise=self.anew)
        if content is None:
            return None
        if self.path.stat().st_uid != os.geteuid():
            raise ConfigError(f"{self.path} belongs to another user: put back the key of the {self.what}.")
        try:
            entry = json.loads(content)
            if "keyring" in entry:
                return self._from_keyring(str(entry["keyring"]))
            return _key(entry["key"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} is damaged: put back a copy of it, or the {self.what} cannot be read."
            ) from error

    def read_or_make(self) -> bytes:
        """The key, made now if there is none. For a store that is not sealed yet."""
        known = self.read()
        if known is not None:
            return known
        key = secrets.token_bytes(KEY_BYTES)
        try:
            make_folder(self.path.parent)
            write_private(self.path, json.dumps(self._entry(key)).encode(), replace=False)
        except OSError as error:
            raise ConfigError(
                f"The key of the {self.what} cannot be kept in {self.path}: {error.strerror}. Make that folder "
                "writable, or set encrypt_documents to false."
            ) from error
        made = self.read()  # another program may have been first
        assert made is not None, "it has just been written"
        return made

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _entry(self, key: bytes) -> dict[str, object]:
        """The content of the file, after putting the key into the keyring if there is one."""
        encoded = base64.b64encode(key).decode()
        keyring = self.find_keyring()
        if keyring is not None:
            name = secrets.token_hex(8)
            try:
                keyring.set_password(SERVICE, name, encoded)
                if keyring.get_password(SERVICE, name) == encoded:
                    return {"format": 1, "keyring": name}
            except Exception as error:  # each keyring has errors of its own: locked, no session, refused
                _log.info(
                    "the key of the %s goes into %s, since the keyring refuses it: %s", self.what, self.path, error
                )
        return {"format": 1, "key": encoded}

    def _from_keyring(self, name: str) -> bytes:
        keyring = self.find_keyring()
        if keyring is None:
            raise ConfigError(
                f"The key of the {self.what} of {self.store} is in the system's keyring ({SERVICE} / {name}), and "
                "there is none here: start in the session of its user, with the extra paceline[keyring] installed."
            )
        try:
            value = keyring.get_password(SERVICE, name)
        except Exception as error:  # as above
            raise ConfigError(
                f"The key of the {self.what} of {self.store} is in the system's keyring, which cannot be opened "
                f"({error}): unlock it and start again."
            ) from error
        if value is None:
            raise ConfigError(
                f"The system's keyring no longer has the key of the {self.what} of {self.store} ({SERVICE} / {name}): "
                f"put it back, or {self.anew}."
            )
        return _key(value)


def _key(encoded: str) -> bytes:
    """Raises ValueError."""
    try:
        key = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
    if len(key) != KEY_BYTES:
        raise ValueError("not of this length")
    return key
