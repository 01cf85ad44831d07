"""Encryption at rest: sealing with AES-256-GCM, where the keys lie, and the seal of a folder's answers.

There is one data key for each document, upload or response. It is random, and stands beside what it seals, wrapped with
a key that is derived from the store's: removing a row destroys the only copy of its key. Each sealed value is bound to
its place (its document, its column, its position) as additional data, so values cannot be exchanged. Columns that are
looked up hold a keyed hash. A plain store goes through the same calls, which change nothing. Not hidden: the number and
sizes of values, when they were written, and to which owner they belong. What is sealed is decided where it is written.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paceline.errors import ConfigError, StorageError
from paceline.secret_files import make_folder, read_private, write_private
from paceline.system import user_id

if TYPE_CHECKING:
    from keyring.backend import KeyringBackend

FRAME: Final = 1 << 20  # bytes of a file that are sealed together
KEY_BYTES: Final = 32
NONCE: Final = 12
OVERHEAD: Final = NONCE + 16  # bytes that sealing adds
_MARK = "paceline 1 "  # of additional data, so that a later form is never taken for this one
_KEPT_BOXES = 256  # data keys in memory


class DamagedError(StorageError):
    """A sealed value does not hold what was written: it was changed, or belongs elsewhere."""


class Box:
    """Encrypts and decrypts the values of one data key. This base class is a plain store's: values stay as they are."""

    overhead = 0  # bytes that sealing adds

    def seal(self, plain: bytes, place: str) -> bytes:  # noqa: ARG002  # likewise below: a plain store needs none
        """The bytes to store. place: which of the key's values this is, such as a column and a row's number; `open`
        needs the same."""
        return plain

    def open(self, sealed: bytes, place: str) -> bytes:  # noqa: ARG002
        """What was given to `seal`. Raises DamagedError unless that was with this key and this place."""
        return sealed

    def seal_text(self, text: str, place: str) -> str | bytes:  # noqa: ARG002
        return text

    def open_text(self, value: str | bytes, place: str) -> str:
        """Raises DamagedError as `open`."""
        if not isinstance(value, str):
            raise DamagedError(f"{place} is not a text")
        return value

    def seal_file(self, content: BinaryIO) -> Iterator[bytes]:
        """The pieces to write for a file, from the position of `content` to its end."""
        sealer = FileSealer(self)
        while data := content.read(FRAME):
            yield from sealer.add(data)
        yield sealer.end()

    def open_file(self, stored: BinaryIO) -> Iterator[bytes]:
        """The content of a file, piece by piece. Raises DamagedError, at the end for one that was cut off."""
        size = FRAME + self.overhead
        number, piece = 0, stored.read(size)
        while True:
            following = stored.read(size)
            yield self.open(piece, _frame(number, last=not following))
            if not following:
                return
            number, piece = number + 1, following


class SealedBox(Box):
    """Seals with AES-256-GCM under random nonces: below 2^32 values for each key."""

    overhead = OVERHEAD

    def __init__(self, key: bytes, owner: str) -> None:
        """owner: what the key is for, such as a document's id."""
        self._cipher = AESGCM(key)
        self._owner = owner

    def seal(self, plain: bytes, place: str) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._cipher.encrypt(nonce, plain, self._bound(place))

    def open(self, sealed: bytes, place: str) -> bytes:
        try:
            return self._cipher.decrypt(sealed[:NONCE], sealed[NONCE:], self._bound(place))
        except (InvalidTag, ValueError, TypeError) as error:  # ValueError: too short; TypeError: not bytes at all
            raise DamagedError(f"{self._owner} is damaged ({place}): its seal does not fit") from error

    def seal_text(self, text: str, place: str) -> str | bytes:
        return self.seal(text.encode("utf-8", "surrogatepass"), place)

    def open_text(self, value: str | bytes, place: str) -> str:
        return self.open(cast(bytes, value), place).decode("utf-8", "surrogatepass")

    def _bound(self, place: str) -> bytes:
        return f"{_MARK}{self._owner}\0{place}".encode("utf-8", "surrogatepass")


PLAIN_BOX: Final = Box()


class FileSealer:
    """Seals one file whose content comes in pieces of any size."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._held = bytearray()  # not sealed yet, as it may be the end
        self._number = 0

    def add(self, data: bytes) -> Iterator[bytes]:
        """The pieces to write that are complete with more content."""
        if not self._box.overhead:  # a plain store: nothing needs to be whole
            yield bytes(data)
            return
        self._held += data
        while len(self._held) > FRAME:
            yield self._box.seal(bytes(self._held[:FRAME]), _frame(self._number, last=False))
            del self._held[:FRAME]
            self._number += 1

    def end(self) -> bytes:
        """The last piece to write; of a plain store, nothing."""
        return self._box.seal(bytes(self._held), _frame(self._number, last=True))


class Seal:
    """The keys of one store. This base class is a plain store's: it makes none, and everything is stored as it is."""

    is_on = False
    name = ""  # as the store records which seal it has
    rows: Box = PLAIN_BOX  # what belongs to no document: names of vector stores, attributes
    kv_secret = b""  # key of the hashes that name files of stored KV

    def lookup(self, value: str | bytes) -> str:
        """What is stored in place of a value by which rows are found: a keyed hash of it, here the value itself.

        Equal values give equal results in one store, so a query compares with the result. "" stays "": no value.
        """
        return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")

    def make_key(self, owner: str) -> tuple[bytes, Box]:  # noqa: ARG002
        """Make a data key for `owner`, such as a document's id: (the wrapped key, to be stored; its box)."""
        return b"", PLAIN_BOX

    def box(self, stored: bytes, owner: str) -> Box:  # noqa: ARG002
        """The box of a wrapped key made by `make_key`. Raises DamagedError if it was changed or is another owner's."""
        return PLAIN_BOX

    def forget(self) -> None:
        """Forget the data keys in memory, as documents have been removed."""


class StoreSeal(Seal):
    """The keys of an encrypted store, all derived from its one key. Safe to use from several threads."""

    is_on = True

    def __init__(self, key: bytes, salt: bytes) -> None:
        """key: the store's; salt: 16 random bytes of this store, so that stores may share a key."""

        def derived(purpose: str) -> bytes:
            return HKDF(SHA256(), 32, salt, f"{_MARK}{purpose}".encode()).derive(key)

        self.name = f"1 {salt.hex()} {derived('check').hex()[:32]}"
        self.rows = SealedBox(derived("rows"), "rows")
        self.kv_secret = derived("kv")
        self._lookup = derived("lookup")
        self._wrap = SealedBox(derived("wrap"), "key")
        self._boxes: dict[tuple[str, bytes], Box] = {}

    @classmethod
    def new(cls, key: bytes) -> StoreSeal:
        return cls(key, secrets.token_bytes(16))

    @classmethod
    def of(cls, name: str, key: bytes) -> StoreSeal | None:
        """The seal that a store records; None if the key is another's."""
        parts = name.split()
        if len(parts) != 3 or parts[0] != "1":
            return None
        try:
            seal = cls(key, bytes.fromhex(parts[1]))
        except ValueError:
            return None
        return seal if hmac.compare_digest(seal.name, name) else None

    def lookup(self, value: str | bytes) -> str:
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        return hmac.digest(self._lookup, data, "sha256").hex() if data else ""

    def make_key(self, owner: str) -> tuple[bytes, Box]:
        key = secrets.token_bytes(KEY_BYTES)
        return self._wrap.seal(key, owner), SealedBox(key, owner)

    def box(self, stored: bytes, owner: str) -> Box:
        boxes = self._boxes  # of which nothing is kept where all are forgotten meanwhile
        known = boxes.get((owner, stored))
        if known is not None:
            return known
        box = SealedBox(self._wrap.open(stored, owner), owner)
        if len(boxes) >= _KEPT_BOXES:
            boxes.clear()
        boxes[owner, stored] = box
        return box

    def forget(self) -> None:
        self._boxes = {}


PLAIN: Final = Seal()


def _frame(number: int, *, last: bool) -> str:
    return f"bytes {number}{' end' if last else ''}"


INSIDE = "documents.key"  # in the folder itself, where that is a mount point
SERVICE = "paceline documents"  # in the keyring
_log = logging.getLogger("paceline.rag")


def system_keyring() -> KeyringBackend | None:
    """The keyring of the operating system; None without the library, or where it has only makeshifts."""
    try:
        import keyring
    except ImportError:
        return None
    backend = keyring.get_keyring()
    # 1 and above are those that the library recommends; below are files in plain text, and the one that always fails.
    return backend if backend.priority >= 1 else None


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The key of the store in one folder, in the keyring of the operating system or in a file of mode 0600.

    The file beside the store (`docs.key` for the folder `docs`) always exists: it holds the key, or says under which
    name the keyring has it, so that a keyring that is locked or absent is never mistaken for a store without a key.
    Where the folder is a mount point the file lies in it, since what is beside it may be on a disk that is thrown away.
    Methods raise ConfigError with what to do. Not handled: an attacker who acts as this user.
    """

    store: Path
    what: str = "documents"  # as messages call what is sealed with it
    anew: str = "choose another folder and add them again"  # what to do without the key, likewise

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
        if self.path.stat().st_uid != user_id():
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

    def new_seal(self) -> StoreSeal:
        """A seal for a store that is not sealed yet, with its key, made now if there is none."""
        return StoreSeal.new(self.read_or_make())

    def open_seal(self, name: str, place: Path) -> StoreSeal:
        """The seal that the store records as `name`. place: where it is, for messages. Without its key nothing is
        changed."""
        where = f"{self.what[0].upper()}{self.what[1:]} in {place}"
        key = self.read()
        if key is None:
            raise ConfigError(
                f"{where} are encrypted, and {self.path}, which held their key, is gone: put it back, or {self.anew}. "
                "Nothing was changed."
            )
        seal = StoreSeal.of(name, key)
        if seal is None:
            raise ConfigError(
                f"{where} are encrypted with another key than that of {self.path}: put back the file that belongs to "
                f"them, or {self.anew}. Nothing was changed."
            )
        return seal

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _entry(self, key: bytes) -> dict[str, object]:
        """The content of the file, after putting the key into the keyring if there is one."""
        encoded = base64.b64encode(key).decode()
        keyring = system_keyring()
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
        keyring = system_keyring()
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
    key = base64.b64decode(encoded, validate=True)
    if len(key) != KEY_BYTES:
        raise ValueError("not of this length")
    return key


MARK = "answers.seal"  # says under which key: written once, by the first program that is to encrypt
RESPONSES = "responses.sqlite"
REMOVE = "remove responses.sqlite, tables and answers.seal: they hold past answers only"


def answers_key(state: Path) -> StoreKey:
    return StoreKey(state / "answers", what="stored responses", anew=REMOVE)


def open_answers_seal(state: Path, *, encrypt: bool) -> Seal:
    """The seal of the answers in this state folder (stored responses and look-up tables); one is made if there is none
    and `encrypt` says so, and all programs of the folder seal from then on.

    Raises ConfigError for a folder whose seal is gone, or was made with a key that is gone, or with another.
    """
    where, mark = answers_key(state), state / MARK
    name = _read(mark)
    if name is None:
        if _has_sealed(state / RESPONSES):  # another seal would not open them, with the same key either
            raise ConfigError(
                f"Stored responses in {state} are encrypted, and {mark}, which says how, is gone: put it back, or "
                f"{REMOVE}. Nothing was changed."
            )
        if not encrypt:
            return PLAIN
        made = where.new_seal()
        try:
            write_private(mark, made.name.encode(), replace=False)
        except OSError as error:
            raise ConfigError(f"{mark} cannot be written: {error.strerror}. Make that folder writable.") from error
        name = _read(mark)  # another program may have been first
        assert name is not None, "it has just been written"
    return where.open_seal(name, state)


def _has_sealed(responses: Path) -> bool:
    """True if this file holds a sealed response. False too for one that cannot be read: who opens it says why."""
    if not responses.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{responses.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT 1 FROM response_keys LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return False


def _read(mark: Path) -> str | None:
    content = read_private(mark, otherwise=REMOVE)
    return None if content is None else content.decode("utf-8", "replace")
