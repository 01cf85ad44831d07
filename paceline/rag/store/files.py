"""Uploaded files: their bytes in a folder beside the documents, their rows in the documents' database.

A file is stored whole or not at all: its bytes are written to a temporary name and renamed in the transaction that
inserts the row. Bytes without a row, left by a crash, are removed when the store is next opened. A file belongs to an
owner; for other owners its id does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.errors import ConfigError, RequestError, StorageError
from paceline.rag.database import Database, SharedConnection
from paceline.rag.parsing.kinds import MAX_FILE_BYTES
from paceline.rag.parsing.parsed import MAX_NAME
from paceline.rag.store.paging import Paging, page

FOLDER = "files"  # in the folder of the documents
FILE_PREFIX = "file-"  # of ids; distinguishes uploads from other documents
MAX_FILES = 10_000  # per owner
MAX_OWNED_BYTES = 16 * 2**30  # of one owner's files together
MAX_ARRIVING = 32  # uploads of one owner at once, each of them in a temporary file of up to MAX_FILE_BYTES
_HALF_WRITTEN = ".part"
_STALE_S = 3600.0  # age above which half-written bytes belong to no upload under way, in any process
_COLUMNS = "seq, id, name, purpose, bytes, created_at"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An uploaded file."""

    id: str
    name: str  # as uploaded, after `harmless`
    purpose: str
    num_bytes: int
    created_at: float  # s since 1970


class Uploads:
    """The uploaded files of all owners. Safe to use from several threads; methods block on the disk."""

    def __init__(self, directory: Path, connection: SharedConnection) -> None:
        """Raises ConfigError when the folder cannot be used."""
        self._folder = directory / FOLDER
        self._connection = connection
        self._lock = threading.Lock()
        self._arriving: Counter[str] = Counter()  # uploads under way, by owner
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._remove_orphans()
        except OSError as error:
            raise ConfigError(f"The folder of uploads {self._folder} cannot be used: {error.strerror}.") from error

    def add(self, owner: str, name: str, purpose: str, content: BinaryIO) -> StoredFile:
        """Store the content from its position to its end. Raises RequestError for too many files or bytes."""
        with self._connection.reading() as database:
            _check_quota(database, owner, 1)
        file_id = f"{FILE_PREFIX}{secrets.token_hex(16)}"
        part = self.path(file_id).with_suffix(_HALF_WRITTEN)
        try:
            num_bytes = self._write(part, content)
            if num_bytes > MAX_FILE_BYTES:
                raise too_large()
            stored = StoredFile(file_id, harmless(name), purpose, num_bytes, time.time())
            with self._connection.writing() as database:
                _check_quota(database, owner, num_bytes)  # again: others may have been stored meanwhile
                database.execute(
                    "INSERT INTO files (id, owner, name, purpose, bytes, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                    file_id, owner, stored.name, purpose, num_bytes, stored.created_at,
                )  # fmt: skip
                part.rename(self.path(file_id))
        finally:
            part.unlink(missing_ok=True)
        return stored

    @contextlib.contextmanager
    def receiving(self, owner: str) -> Iterator[None]:
        """Held while an upload arrives, which bounds what lies in temporary files. Raises RequestError (429)."""
        with self._lock:
            if self._arriving[owner] >= MAX_ARRIVING:
                raise RequestError(
                    f"{MAX_ARRIVING} uploads are arriving already: wait for one to end.",
                    status=429, type="rate_limit_error", code="too_many_uploads",
                )  # fmt: skip
            self._arriving[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                self._arriving[owner] -= 1
                self._arriving += Counter()  # forgets owners without any

    def get(self, owner: str, file_id: str) -> StoredFile:
        """A file's record. Raises RequestError (404) when the owner has no such file."""
        with self._connection.reading() as database:
            row = database.execute(
                f"SELECT {_COLUMNS} FROM files WHERE owner = ? AND id = ?", owner, file_id
            ).fetchone()
        if row is None:
            raise missing("file", file_id)
        return StoredFile(*row[1:])

    def page(self, owner: str, paging: Paging, purpose: str | None = None) -> tuple[list[StoredFile], bool]:
        """Files, and whether there are more."""
        source, parameters = f"SELECT {_COLUMNS} FROM files WHERE owner = ?", [owner]
        if purpose is not None:
            source, parameters = f"{source} AND purpose = ?", [owner, purpose]
        with self._connection.reading() as database:
            rows, more = page(database, source, list(parameters), paging)
        return [StoredFile(*row) for row in rows], more

    def path(self, file_id: str) -> Path:
        """Path of a file's bytes. The id must be one that `add` has returned."""
        return self._folder / file_id

    def _write(self, path: Path, content: BinaryIO) -> int:
        """Write and sync the content. Returns the number of bytes. Raises StorageError for errors of the disk."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                shutil.copyfileobj(content, stream, 1 << 20)
                stream.flush()
                os.fsync(stream.fileno())
                return stream.tell()
        except OSError as error:
            message = f"The file {path} could not be stored: {error.strerror}. Is the disk full?"
            raise StorageError(message, full=error.errno in (errno.ENOSPC, errno.EDQUOT)) from error

    def _remove_orphans(self) -> None:
        """Remove bytes that belong to no row.

        A write transaction excludes other processes that have renamed a file and not yet committed its row.
        """
        with self._connection.writing() as database:
            known = {row[0] for row in database.execute("SELECT id FROM files")}
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # half-written a moment ago, and now renamed or removed
                    half = path.suffix == _HALF_WRITTEN
                    if time.time() - path.stat().st_mtime > _STALE_S if half else path.name not in known:
                        path.unlink()


def _check_quota(database: Database, owner: str, num_bytes: int) -> None:
    """Raise RequestError unless one more file of this size is within the owner's limits."""
    count, held = database.execute("SELECT count(*), total(bytes) FROM files WHERE owner = ?", owner).fetchone()
    if count >= MAX_FILES or held + num_bytes > MAX_OWNED_BYTES:
        raise RequestError(
            f"There are {count} files of {held / 2**20:.0f} MiB; {MAX_FILES} of {MAX_OWNED_BYTES // 2**20} MiB "
            "are the most: delete some first.",
            code="limit_exceeded",
        )


def harmless(name: str) -> str:
    """A safe file name: a path's last part, printable, short enough for file systems; never empty, `.` or `..`."""
    last = unicodedata.normalize("NFC", name).replace("\\", "/").rstrip("/").rpartition("/")[2].strip()
    shown = "".join(character if character.isprintable() else "_" for character in last)
    if len(shown) > MAX_NAME:
        suffix = Path(shown).suffix[:16]
        shown = shown[: MAX_NAME - len(suffix)] + suffix
    return shown if shown.strip(". ") else "file"


def missing(kind: str, name: str) -> RequestError:
    """The error (404) for an id that the owner does not have."""
    return RequestError(f"No such {kind}: {name[:64]}.", status=404, code="not_found", param="id")


def too_large() -> RequestError:
    """The error (413) for an upload of more than MAX_FILE_BYTES."""
    return RequestError(
        f"The file is larger than {MAX_FILE_BYTES} bytes.", status=413, code="request_too_large", param="file"
    )
