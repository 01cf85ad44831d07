"""Uploads on their way: their bytes lie in the folder of uploads and count for their owner before they are written.

What an owner's uploads take together, stored or arriving, so never exceeds its limits, however many arrive at once. In
a sealed store they are encrypted as they come. Counted in this process: another one that stores uploads in the same
folder sees what has been stored.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from paceline.errors import RequestError, StorageError, is_full
from paceline.rag.parsing.kinds import MAX_FILE_BYTES
from paceline.sealing.seal import PLAIN_BOX, Box, FileSealer

MAX_ARRIVING = 32  # uploads of one owner at once
STEP = 1 << 20  # bytes reserved at a time, where the owner has room for them

Check = Callable[[str, int, int], None]


class Arrivals:
    """The uploads under way of all owners. Safe to use from several threads."""

    def __init__(self, check: Check) -> None:
        """check(owner, files, bytes): raises RequestError unless the owner may store so many more."""
        self._check = check
        self._lock = threading.Lock()
        self._uploads: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def begin(self, owner: str, path: Path, num_bytes: int, key: bytes = b"", box: Box = PLAIN_BOX) -> Arrival:
        """Reserve a file of at least so many bytes. Raises RequestError for too many, in number (429) or bytes.

        key, box: of the file's seal.
        """
        with self._lock:
            if self._uploads[owner] >= MAX_ARRIVING:
                raise RequestError(
                    f"{MAX_ARRIVING} uploads are arriving already: wait for one to end.",
                    status=429, type="rate_limit_error", code="too_many_uploads",
                )  # fmt: skip
            self._check(owner, self._uploads[owner] + 1, self._bytes[owner] + num_bytes)
            self._uploads[owner] += 1
            self._bytes[owner] += num_bytes
        try:
            return Arrival(self, owner, path, num_bytes, key, box)
        except BaseException:
            self.end(owner, num_bytes)
            raise

    def reserve(self, owner: str, num_bytes: int) -> int:
        """Reserve so many more bytes, or a whole STEP. Returns their number; raises RequestError without room."""
        with self._lock:
            files, held = self._uploads[owner], self._bytes[owner]
            for wanted in (max(STEP, num_bytes), num_bytes):
                try:
                    self._check(owner, files, held + wanted)
                except RequestError:
                    if wanted == num_bytes:
                        raise
                else:
                    break
            self._bytes[owner] += wanted
        return wanted

    def end(self, owner: str, num_bytes: int) -> None:
        """Give back what an upload has reserved."""
        with self._lock:
            self._uploads[owner] -= 1
            self._bytes[owner] -= num_bytes
            self._uploads += Counter()  # forgets owners without any
            self._bytes += Counter()


class Arrival:
    """One upload, until `close`, which removes its bytes unless they have been renamed."""

    def __init__(self, arrivals: Arrivals, owner: str, path: Path, reserved: int, key: bytes, box: Box) -> None:
        """Raises StorageError when the file cannot be made."""
        self.key, self.box = key, box
        self._sealer = FileSealer(box)
        self.owner = owner
        self.path = path
        self.num_bytes = 0  # of the content
        self._arrivals = arrivals
        self._reserved = reserved
        self._closed = False
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except OSError as error:
            raise self._fault(error) from error

    def write(self, data: bytes) -> int:
        """Append to the file. Raises RequestError beyond MAX_FILE_BYTES (413) or the owner's limits, StorageError."""
        size = self.num_bytes + len(data)
        if size > MAX_FILE_BYTES:
            raise too_large()
        if size > self._reserved:
            self._reserved += self._arrivals.reserve(self.owner, size - self._reserved)
        try:
            self._file.writelines(self._sealer.add(data))
        except OSError as error:
            raise self._fault(error) from error
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
            raise self._fault(error) from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # what could not be written is removed
            self._file.close()
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self._arrivals.end(self.owner, self._reserved)

    def _fault(self, error: OSError) -> StorageError:
        message = f"The file {self.path} could not be stored: {error.strerror}. Is the disk full?"
        return StorageError(message, full=is_full(error))


def too_large() -> RequestError:
    """The error (413) for an upload of more than MAX_FILE_BYTES."""
    return RequestError(
        f"The file is larger than {MAX_FILE_BYTES} bytes.", status=413, code="request_too_large", param="file"
    )
