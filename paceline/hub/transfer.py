"""One file from the hub: written beside its place, continued where it was cut, checked, then moved there.

huggingface_hub itself begins a file anew in every process, so a shard of 5 GB would be lost with each interruption; it
also checks the size alone. The session, its proxies and its credentials are huggingface_hub's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import BinaryIO, Final

from paceline.errors import ConfigError
from paceline.hub.names import GIT_SHA1, SHA256, path_part

MAX_FILE: Final = 1 << 40  # bytes, far above any file of a model
PARTIAL: Final = ".partial"  # behind the name of a file that is not whole yet
ATTEMPTS: Final = 5  # without a byte in between
WAIT_S: Final = 1.0  # before the second attempt; twice as long before each further one
MAX_WAIT_S: Final = 300.0  # that the hub may ask for: its limits are counted over five minutes
_CHUNK: Final = 1 << 20

Counted = Callable[[int], None]
"""Called with the bytes that have come; negative where some must come again."""


_log = logging.getLogger("paceline.hub")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub describes it, in values that may be anything. Raises ConfigError for what no file has."""

    url: str
    size: int
    sha256: str | None  # of a large file
    git_sha1: str | None  # of a small one, as git names it

    def __post_init__(self) -> None:
        path_part(self.blob, SHA256 if self.sha256 else GIT_SHA1)
        if type(self.size) is not int or not 0 <= self.size <= MAX_FILE:
            raise ConfigError(f"The hub says that {self.url} has {str(self.size)[:40]} bytes, which no file has.")

    @property
    def blob(self) -> str:
        """Its name in the cache."""
        return self.sha256 or self.git_sha1 or ""


def fetch(
    file: RemoteFile,
    path: Path,
    headers: Mapping[str, str],
    counted: Counted,
    *,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Bring the file to `path`, of which the part that an earlier call has left is not fetched again.

    Raises ConfigError for content that is not what the hub says it is, and while another process fetches it; what the
    hub's client raises where it cannot be reached or refuses.
    """
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("ab") as stream:
        try:
            flock(stream, LOCK_EX | LOCK_NB)
        except OSError:
            raise ConfigError(f"{partial} is being written by another process: wait until it has ended.") from None
        if path.exists():  # another process has just ended with it
            counted(file.size - stream.tell())
            return
        _fill(file, stream, headers, counted, wait)
        stream.flush()
        os.fsync(stream.fileno())
        if not _is_right(file, partial):
            partial.unlink()
            raise ConfigError(
                f"{file.url} came with content that is not what the hub says it is, and was thrown away. Try again; if "
                "it happens again, something between here and the hub changes it."
            )
        partial.rename(path)


def _fill(
    file: RemoteFile, stream: BinaryIO, headers: Mapping[str, str], counted: Counted, wait: Callable[[float], None]
) -> None:
    failures = 0
    if (held := stream.tell()) > file.size:  # of another version of the file
        stream.truncate(0)
        counted(-held)
    while (held := stream.tell()) < file.size:
        try:
            _append(file, stream, headers, counted)
            if stream.tell() < file.size:
                raise ConnectionError("the connection was closed early")
        except Exception as error:  # the hub's client passes on errors of several HTTP libraries
            failures = 1 if stream.tell() > held else failures + 1
            if failures >= ATTEMPTS or _is_final(error):
                raise
            seconds = WAIT_S * 2 ** (failures - 1)
            if asked_wait(error) > seconds:
                seconds = min(MAX_WAIT_S, asked_wait(error))
                _log.warning("the Hugging Face hub asks to wait for %g s", seconds)
            wait(seconds)


def _append(file: RemoteFile, stream: BinaryIO, headers: Mapping[str, str], counted: Counted) -> None:
    """One request for what is missing."""
    from huggingface_hub import get_session, hf_raise_for_status

    held = stream.tell()
    # Bytes as they lie there: a range of compressed content is of other bytes.
    asked = {**headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={held}-"} if held else {})
    with get_session().stream("GET", file.url, headers=asked, timeout=30.0) as response:
        if not response.is_success:
            response.read()  # the words of the refusal
        hf_raise_for_status(response)
        if held and response.status_code != 206:
            stream.truncate(0)
            counted(-held)
        for chunk in response.iter_bytes():
            stream.write(chunk)
            counted(len(chunk))
            if stream.tell() > file.size:  # not the file; its sender may never end
                return


def asked_wait(error: Exception) -> float:
    """Seconds after which the hub lets itself be asked again, as its refusal says; 0: it does not say."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    found = re.fullmatch(r"\d{1,6}", headers.get("retry-after", "")) or re.search(
        r";\s*r=0\b.*?;\s*t=(\d{1,6})", headers.get("ratelimit", "")
    )
    return float(found[found.re.groups]) if found else 0.0


def _is_final(error: Exception) -> bool:
    """The hub has refused, or this machine cannot go on: asking again changes nothing."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(status, int):
        return status < 500 and status not in (408, 429)
    return isinstance(error, OSError) and not isinstance(error, ConnectionError) and error.errno is not None


def _is_right(file: RemoteFile, path: Path) -> bool:
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == file.blob
