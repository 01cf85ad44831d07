"""Uploaded files: their bytes in a folder beside the documents, their rows in the documents' database.

A file is wholly there or not at all: its bytes are written aside and get their name in the transaction that makes the
row. Bytes without a row are no file; what a crash leaves of them is removed when the store is opened next. A file
belongs to an owner, and for others there is none of that name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.errors import ConfigError, RequestError
from paceline.rag.database import SharedConnection
from paceline.rag.parse import MAX_NAME
from paceline.rag.store.paging import Paging, page

FOLDER = "files"  # in the folder of the documents
FILE_PREFIX = "file-"  # of ids, which tells uploads from other documents
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FILES = 10_000  # of one owner
MAX_OWNED_BYTES = 16 * 2**30  # of one owner's files together
_HALF_WRITTEN = ".part"
_STALE_S = 3600.0  # half-written bytes that are older are of no upload that is under way, here or in another process
_COLUMNS = "seq, id, name, purpose, bytes, created_at"


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    name: str  # as it was uploaded, made harmless
    purpose: str
    num_bytes: int
    created_at: float  # s since 1970


class Uploads:
    """Safe to use from several threads; methods wait for the disk."""

    def __init__(self, directory: Path, rows: SharedConnection) -> None:
        """Raises ConfigError when the folder cannot be used."""
        self._folder = directory / FOLDER
        self._rows = rows
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._tidy()
        except OSError as error:
            raise ConfigError(f"The folder of uploads {self._folder} cannot be used: {error.strerror}.") from error

    def add(self, owner: str, name: str, purpose: str, content: BinaryIO) -> StoredFile:
        """From the content's place to its end. Raises RequestError for too many files or bytes."""
        with self._rows.reading() as database:
            count, held = database.execute("SELECT count(*), total(bytes) FROM files WHERE owner = ?", owner).fetchone()
        if count >= MAX_FILES or held >= MAX_OWNED_BYTES:
            raise RequestError(
                f"There are {count} files of {held / 2**20:.0f} MiB; {MAX_FILES} of {MAX_OWNED_BYTES // 2**20} MiB "
                "are the most: delete some first.",
                code="limit_exceeded",
            )
        file_id = f"{FILE_PREFIX}{secrets.token_hex(16)}"
        part = self.path(file_id).with_suffix(_HALF_WRITTEN)
        try:
            num_bytes = self._write(part, content)
            if num_bytes > MAX_FILE_BYTES:
                raise too_large()
            stored = StoredFile(file_id, harmless(name), purpose, num_bytes, time.time())
            with self._rows.writing() as database:
                database.execute(
                    "INSERT INTO files (id, owner, name, purpose, bytes, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                    file_id, owner, stored.name, purpose, num_bytes, stored.created_at,
                )  # fmt: skip
                part.rename(self.path(file_id))
        finally:
            part.unlink(missing_ok=True)
        return stored

    def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises RequestError (404) when the owner has no such file."""
        with self._rows.reading() as database:
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
        with self._rows.reading() as database:
            rows, more = page(database, source, list(parameters), paging)
        return [StoredFile(*row) for row in rows], more

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file lie; the id must be one that was given out."""
        return self._folder / file_id

    def read(self, file_id: str, most: int) -> bytes:
        """At most so many bytes from the beginning. Raises FileNotFoundError."""
        with self.path(file_id).open("rb") as stream:
            return stream.read(most)

    def _write(self, path: Path, content: BinaryIO) -> int:
        """Returns the number of bytes, which are on the disk then. Raises ConfigError for a full disk and the like."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                shutil.copyfileobj(content, stream, 1 << 20)
                stream.flush()
                os.fsync(stream.fileno())
                return stream.tell()
        except OSError as error:
            raise ConfigError(f"The file could not be stored: {error.strerror}. Is the disk full?") from error

    def _tidy(self) -> None:
        """Remove bytes that belong to no row. In a writing transaction: no other process is between name and row."""
        with self._rows.writing() as database:
            known = {row[0] for row in database.execute("SELECT id FROM files")}
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # half-written, and now whole or given up
                    half = path.suffix == _HALF_WRITTEN
                    if time.time() - path.stat().st_mtime > _STALE_S if half else path.name not in known:
                        path.unlink()


def harmless(name: str) -> str:
    """The last part of a path, printable, of a length that file systems allow; never empty, `.` or `..`."""
    last = unicodedata.normalize("NFC", name).replace("\\", "/").rstrip("/").rpartition("/")[2].strip()
    shown = "".join(sign if sign.isprintable() else "_" for sign in last)
    if len(shown) > MAX_NAME:
        suffix = Path(shown).suffix[:16]
        shown = shown[: MAX_NAME - len(suffix)] + suffix
    return shown if shown.strip(". ") else "file"


def missing(kind: str, name: str) -> RequestError:
    return RequestError(f"No such {kind}: {name[:64]}.", status=404, code="not_found", param="id")


def too_large() -> RequestError:
    return RequestError(
        f"The file is larger than {MAX_FILE_BYTES} bytes.", status=413, code="request_too_large", param="file"
    )
