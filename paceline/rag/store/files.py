"""Uploaded files: their bytes in a folder beside the documents, their rows in the documents' database; in one that
several servers share their bytes too.

A file is stored whole or not at all: its bytes are written to a temporary name and renamed in the transaction that
inserts the row. In a sealed store the bytes are encrypted with a key that stands, wrapped, in that row. Bytes without a
row, left by a crash, are removed when the store is next opened. A file belongs to an owner; for other owners its id
does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal

from paceline.errors import ConfigError, RequestError, StorageError, is_full
from paceline.rag.database import Database
from paceline.rag.parsing.kinds import MAX_FILE_BYTES
from paceline.rag.parsing.process import MAX_NAME
from paceline.sealing import Box, DamagedError, FileSealer
from paceline.secret_files import private_folder

MAX_ARRIVING = 32  # uploads of one owner at once
STEP = 1 << 20  # bytes reserved at a time, where the owner has room for them


class Arrival:
    """One upload, until `close`, which removes its bytes unless they have been renamed.

    Its bytes lie in the folder of uploads, encrypted as they come in a sealed store, and count for their owner before
    they are written.
    """

    def __init__(self, uploads: Uploads, owner: str, path: Path, reserved: int, key: bytes, box: Box) -> None:
        """Raises StorageError when the file cannot be made."""
        self.key, self.box = key, box
        self._sealer = FileSealer(box)
        self.owner = owner
        self.path = path
        self.num_bytes = 0  # of the content
        self._uploads = uploads
        self._reserved = reserved
        self._closed = False
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except OSError as error:
            raise _fault(self.path, error) from error

    def write(self, data: bytes) -> int:
        """Append to the file. Raises RequestError beyond MAX_FILE_BYTES (413) or the owner's limits, StorageError."""
        size = self.num_bytes + len(data)
        if size > MAX_FILE_BYTES:
            raise too_large()
        if size > self._reserved:
            self._reserved += self._uploads.reserve(self.owner, size - self._reserved)
        try:
            self._file.writelines(self._sealer.add(data))
        except OSError as error:
            raise _fault(self.path, error) from error
        self.num_bytes = size
        return len(data)

    def seek(self, position: int) -> int:
        """As the reader of a form calls it at the end of a file: without effect."""
        return position

    def complete(self) -> None:
        """Everything has been written: bring it to the disk. Once; raises StorageError."""
        try:
            self._file.write(self._sealer.end())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _fault(self.path, error) from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # what could not be written is removed
            self._file.close()
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self._uploads.end(self.owner, self._reserved)


def _fault(path: Path, error: OSError) -> StorageError:
    message = f"The file {path} could not be stored: {error.strerror}. Is the disk full?"
    return StorageError(message, full=is_full(error))


def too_large() -> RequestError:
    """The error (413) for an upload of more than MAX_FILE_BYTES."""
    return RequestError(
        f"The file is larger than {MAX_FILE_BYTES} bytes.", status=413, code="request_too_large", param="file"
    )


# Pages of a list that may grow between requests: cursors are ids, the order is that of creation.


@dataclass(frozen=True, slots=True)
class Paging:
    """A page request: the `limit` items that follow `after`, or the last `limit` before `before`, in this order."""

    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # an item's id
    before: str | None = None


_ORDERED = re.compile("[0-9a-f]{32}")


def ordered_id(prefix: str) -> str:
    """An id that sorts by when it was made, so that lists go on behind one that is gone."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def page(
    database: Database,
    columns: str,
    source: str,
    parameters: Sequence[object],
    paging: Paging,
    *,
    prefix: str = "",
    filters: Mapping[str, object] | None = None,
) -> tuple[list[tuple[Any, ...]], bool]:
    """Read a page inside the caller's transaction: rows without their first column, and whether there are more.

    columns: `seq`, then the id that cursors name, and others. source: a table and the condition of the list. prefix: of
    its ids, if they are by `ordered_id`: a cursor may have been deleted, as in a loop that deletes what it lists.
    filters: values of columns, None for any; a cursor need not fit, as those of files that are still read do not for
    long. Raises RequestError for a cursor that was never in the list.
    """
    key = columns.split(", ")[1]
    conditions = {f"{column} = ?": value for column, value in (filters or {}).items() if value is not None}
    for cursor, name, later in ((paging.after, "after", True), (paging.before, "before", False)):
        if cursor is None:
            continue
        row = database.execute(f"SELECT seq FROM {source} AND {key} = ?", *parameters, cursor).fetchone()
        if row is None and prefix and cursor.startswith(prefix) and _ORDERED.fullmatch(cursor, len(prefix)):
            last = database.execute(f"SELECT max(seq) FROM {source} AND {key} < ?", *parameters, cursor).fetchone()
            row = ((last[0] or 0) + 0.5,)  # between those before it and behind it
        if row is None:
            raise RequestError(f"{name} names {cursor[:64]!r}, which is not in this list.", param=name)
        conditions[f"seq {'>' if later == (paging.order == 'asc') else '<'} ?"] = row[0]
    backwards = paging.before is not None and paging.after is None  # the last rows before the cursor
    direction = "ASC" if (paging.order == "asc") != backwards else "DESC"
    where = "".join(f" AND {condition}" for condition in conditions)
    rows = database.execute(
        f"SELECT {columns} FROM {source}{where} ORDER BY seq {direction} LIMIT ?",
        *parameters,
        *conditions.values(),
        paging.limit + 1,
    ).fetchall()
    found = [tuple(row[1:]) for row in rows[: paging.limit]]
    return found[::-1] if backwards else found, len(rows) > paging.limit


FOLDER = "files"  # in the folder of the documents
FILE_PREFIX = "file-"  # of ids; distinguishes uploads from other documents
MAX_FILES = 10_000  # per owner
MAX_OWNED_BYTES = 16 * 2**30  # of one owner's files together
_HALF_WRITTEN = ".part"
_logger = logging.getLogger("paceline.rag")
_STALE_S = 3600.0  # age above which half-written bytes belong to no upload under way, in any process
SEALED_SUFFIX = ".aes"  # of sealed files, so that a store that is being sealed has either or both
_NAME = "name"  # what it is, to its seal
_COLUMNS = "seq, id, name, purpose, bytes, created_at, key"


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    name: str  # as uploaded, after `harmless`
    purpose: str
    num_bytes: int
    created_at: float  # s since 1970


class Uploads:
    """The uploaded files of all owners. Safe to use from several threads; methods block on the disk.

    What an owner's uploads take together, stored or arriving, never exceeds its limits, however many arrive at once.
    What arrives is counted in this process: another one that stores uploads in the same folder sees what has been
    stored.
    """

    def __init__(self, directory: Path, database: Database) -> None:
        """Raises ConfigError when the folder cannot be used."""
        self._folder = directory / FOLDER
        self._database = database
        self._lock = threading.Lock()  # of what arrives, by owner
        self._arriving: Counter[str] = Counter()
        self._arriving_bytes: Counter[str] = Counter()
        self._seal = database.seal  # it never changes while the store is open
        try:
            private_folder(self._folder)
            self._remove_orphans()
        except OSError as error:
            raise ConfigError(f"The folder of uploads {self._folder} cannot be used: {error.strerror}.") from error

    def add(self, owner: str, name: str, purpose: str, content: BinaryIO) -> StoredFile:
        """Store the content from its position to its end. Raises RequestError for too many files or bytes."""
        with closing(self.receive(owner)) as arrival:
            while data := content.read(STEP):
                arrival.write(data)
            return self.keep(arrival, name, purpose)

    def receive(self, owner: str, num_bytes: int = 0) -> Arrival:
        """A place for an upload of at least so many bytes, for its bytes to be written to and kept. Raises RequestError
        for too many files or bytes, and for too many uploads at once (429)."""
        file_id = ordered_id(FILE_PREFIX)
        key, box = self._seal.make_key(file_id)
        with self._lock:
            if self._arriving[owner] >= MAX_ARRIVING:
                raise RequestError(
                    f"{MAX_ARRIVING} uploads are arriving already: wait for one to end.",
                    status=429, type="rate_limit_error", code="too_many_uploads",
                )  # fmt: skip
            self._check(owner, self._arriving[owner] + 1, self._arriving_bytes[owner] + num_bytes)
            self._arriving[owner] += 1
            self._arriving_bytes[owner] += num_bytes
        try:
            return Arrival(self, owner, (self._folder / file_id).with_suffix(_HALF_WRITTEN), num_bytes, key, box)
        except BaseException:
            self.end(owner, num_bytes)
            raise

    def reserve(self, owner: str, num_bytes: int) -> int:
        """Reserve so many more bytes for an upload that is arriving, or a whole STEP. Returns their number; raises
        RequestError without room."""
        with self._lock:
            files, held = self._arriving[owner], self._arriving_bytes[owner]
            wanted = max(STEP, num_bytes)
            try:
                self._check(owner, files, held + wanted)
            except RequestError:
                wanted = num_bytes
                self._check(owner, files, held + wanted)
            self._arriving_bytes[owner] += wanted
        return wanted

    def end(self, owner: str, num_bytes: int) -> None:
        """Give back what an upload has reserved."""
        with self._lock:
            self._arriving[owner] -= 1
            self._arriving_bytes[owner] -= num_bytes
            self._arriving += Counter()  # forgets owners without any
            self._arriving_bytes += Counter()

    def keep(self, arrival: Arrival, name: str, purpose: str) -> StoredFile:
        """Store an upload that has arrived. Raises RequestError for too many bytes, StorageError."""
        arrival.complete()
        file_id = arrival.path.stem
        stored = StoredFile(file_id, harmless(name), purpose, arrival.num_bytes, time.time())
        with self._database.writing() as database:
            _check_quota(database, arrival.owner, 1, stored.num_bytes)  # again: another process may have stored some
            database.execute(
                "INSERT INTO files (id, owner, name, purpose, bytes, created_at, key) VALUES (?, ?, ?, ?, ?, ?, ?)",
                file_id, arrival.owner, seal_file_name(arrival.box, stored.name), purpose, stored.num_bytes,
                stored.created_at, arrival.key,
            )  # fmt: skip
            if self._database.is_shared:
                with arrival.path.open("rb") as content:
                    pieces = enumerate(iter(lambda: content.read(STEP), b""))
                    parts = ((file_id, number, piece) for number, piece in pieces)
                    database.executemany("INSERT INTO file_parts VALUES (?, ?, ?)", parts)
            else:
                arrival.path.rename(self._folder / stored_name(file_id, sealed=self._seal.is_on))
        return stored

    def get(self, owner: str, file_id: str) -> StoredFile:
        """A file's record. Raises RequestError (404) when the owner has no such file."""
        with self._database.reading() as database:
            row = database.execute(
                f"SELECT {_COLUMNS} FROM files WHERE owner = ? AND id = ?", owner, file_id
            ).fetchone()
            if row is None:
                raise missing("file", file_id)
            return _stored(database, row[1:])

    def page(self, owner: str, paging: Paging, purpose: str | None = None) -> tuple[list[StoredFile], bool]:
        """Files, and whether there are more."""
        with self._database.reading() as database:
            rows, more = page(
                database, _COLUMNS, "files WHERE owner = ?", [owner], paging, prefix=FILE_PREFIX,
                filters={"purpose": purpose},
            )  # fmt: skip
            return [_stored(database, row) for row in rows], more

    def path(self, file_id: str) -> Path | None:
        """Where a file's bytes lie as they were uploaded; None in a sealed or shared store."""
        return None if self._seal.is_on or self._database.is_shared else self._folder / file_id

    def _check(self, owner: str, files: int, num_bytes: int) -> None:
        with self._database.reading() as database:
            _check_quota(database, owner, files, num_bytes)

    def open(self, file_id: str) -> BinaryIO:
        """A file's bytes, in memory where they are sealed or shared, with a descriptor, as a parser takes them.

        Raises as `pieces`.
        """
        if (path := self.path(file_id)) is not None:
            return path.open("rb")
        opened = os.fdopen(os.memfd_create("document"), "w+b")
        try:
            opened.writelines(self.pieces(file_id))
            opened.seek(0)
        except BaseException:
            opened.close()
            raise
        return opened

    def pieces(self, file_id: str) -> Iterator[bytes]:
        """A file's bytes, a few MiB of them in memory at once. The id must be one that `add` has returned.

        Raises FileNotFoundError for one that has been deleted, DamagedError and StorageError, on the way too.
        """
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file_id)
        with self._database.reading() as database:
            row = database.execute("SELECT key, bytes FROM files WHERE id = ?", file_id).fetchone()
        if row is None:
            raise missing
        key, left = row
        if not self._database.is_shared:
            with (self._folder / stored_name(file_id, sealed=self._seal.is_on)).open("rb") as stream:
                yield from self._seal.box(key, file_id).open_file(stream)
            return
        select = "SELECT bytes FROM file_parts WHERE file = ? AND part = ?"
        for part in count():
            if left <= 0:
                return
            with self._database.reading() as database:
                row = database.execute(select, file_id, part).fetchone()
            if row is None:
                raise missing
            left -= len(row[0])
            yield row[0]

    def remove(self, file_id: str) -> None:
        """Remove the bytes of a file whose row has been deleted, unless they have gone with it."""
        if self._database.is_shared:
            return
        for sealed in (False, True):
            (self._folder / stored_name(file_id, sealed=sealed)).unlink(missing_ok=True)

    def _remove_orphans(self) -> None:
        """Remove bytes that belong to no row.

        A write transaction excludes other processes that have renamed a file and not yet committed its row.
        """
        with self._database.writing() as database:
            sealed = database.seal.is_on
            known = {stored_name(file_id, sealed=sealed) for (file_id,) in database.execute("SELECT id FROM files")}
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # half-written a moment ago, and now renamed or removed
                    half = path.suffix == _HALF_WRITTEN
                    if not half and database.is_shared:
                        continue  # of a store in this folder
                    if time.time() - path.stat().st_mtime > _STALE_S if half else path.name not in known:
                        path.unlink()


def stored_name(file_id: str, *, sealed: bool) -> str:
    """The name of a file's bytes in the folder."""
    return f"{file_id}{SEALED_SUFFIX if sealed else ''}"


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Write and sync a new file. Raises StorageError for errors of the disk."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise _fault(path, error) from error


def seal_file_name(box: Box, name: str) -> str | bytes:
    """What is stored for a file's name."""
    return box.seal_text(name, _NAME)


def read_file_name(database: Database, file_id: str) -> str:
    """The name of a file that has a row."""
    row = database.execute(f"SELECT {_COLUMNS} FROM files WHERE id = ?", file_id).fetchone()
    return _stored(database, row[1:]).name


def _stored(database: Database, row: Sequence[Any]) -> StoredFile:
    """A record from a row with the columns `_COLUMNS` after the first; without its name where that is damaged."""
    file_id, name, *rest, key = row
    try:
        shown = database.seal.box(key, file_id).open_text(name, _NAME)
    except DamagedError as error:
        _logger.error("the uploaded file %s is damaged on the disk (%s): delete it and upload it again", file_id, error)
        shown = "(damaged)"
    return StoredFile(file_id, shown, *rest)


def _check_quota(database: Database, owner: str, files: int, num_bytes: int) -> None:
    """Raise RequestError unless so many more files and bytes are within the owner's limits."""
    count, held = database.execute(
        "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE owner = ?", owner
    ).fetchone()
    if count + files > MAX_FILES or held + num_bytes > MAX_OWNED_BYTES:
        raise RequestError(
            f"There are {count} files of {held / 2**20:.0f} MiB, and what is arriving; {MAX_FILES} of "
            f"{MAX_OWNED_BYTES // 2**20} MiB are the most: delete some first.",
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
