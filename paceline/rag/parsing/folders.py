"""Finding files: the named ones, and below named folders every file of a kind that can be read; and reading them ahead.

Links are not followed. What cannot be read is reported and keeps nothing else from being read. A file's stamp tells
whether it may have changed since it was read, without reading it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import BinaryIO

from paceline import __version__
from paceline.errors import DocumentError, ParserLost
from paceline.rag.parsing.kinds import NAMED_KINDS, kind_of
from paceline.rag.parsing.process import MAX_NAME, Parsed, ParserPool
from paceline.rag.records import IngestResult

MAX_TRIES = 3  # of a document whose parser was killed from outside
_AHEAD = 8  # files parsed or read ahead at most; a text has at most 10 MiB
_FRESH_NS = 2_000_000_000  # a file may change again without another time in it: file systems count in up to 2 s


@dataclass(frozen=True, slots=True)
class FoundFile:
    path: Path
    name: str  # the document's name, unless another file's document has it
    stamp: str = ""  # see `stamp_of`
    root: Path | None = None  # the folder below which it was found, and no link may lead to it; None: it was named
    identity: tuple[int, int] = (0, 0)  # device and inode, if it was found below a folder

    @property
    def source(self) -> bytes:
        """The file's identity, however it was named: the absolute path without links, as the file system stores it."""
        return os.fsencode(os.path.realpath(self.path))

    def names(self) -> Iterator[str]:
        """Candidate names for the document: its own, then with more and more of its folders, last with a hash of its
        path. None is longer than MAX_NAME, unless the file's own name is.
        """
        yield self.name
        whole = readable(os.path.realpath(self.path)).strip("/")
        parts = whole.split("/")
        for first in range(len(parts) - len(self.name.split("/")) - 1, -1, -1):
            name = "/".join(parts[first:])
            if len(name) <= MAX_NAME:
                yield name
        path_hash = hashlib.sha256(self.source).hexdigest()[:12]
        yield f"{path_hash}/{self.name}"[:MAX_NAME]


def stamp_of(status: os.stat_result, now_ns: int) -> str:
    """Size, inode and times of a file, which change with its content, and the release, which may read it otherwise; ""
    for a file that was changed in this moment, whose next change they may not show.

    Not noticed: a change that keeps the size and both times, which takes a clock that was set back, or a file system
    that does not keep the time of a change (`st_ctime`).
    """
    if not stat.S_ISREG(status.st_mode) or now_ns - max(status.st_mtime_ns, status.st_ctime_ns) < _FRESH_NS:
        return ""
    return f"{__version__} {status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"


def _found_file(path: Path, name: str, root: Path | None = None) -> FoundFile:
    """With its stamp from before it is read, so that a change meanwhile shows."""
    try:
        status = path.stat(follow_symlinks=root is None)
    except (OSError, ValueError):  # it is gone, or no path: reading it will say so
        return FoundFile(path, name, root=root)
    return FoundFile(path, name, stamp_of(status, time.time_ns()), root, (status.st_dev, status.st_ino))


def read_files(files: Sequence[FoundFile], parsers: ParserPool) -> Iterator[tuple[FoundFile, Parsed | DocumentError]]:
    """Parse files in order, some ahead of the one that is asked for, and one again if its parser is killed.

    A file that cannot be a document yields its error.
    """
    under_way: deque[Future[Parsed]] = deque()
    for number, file in enumerate(files):
        for later in files[number + len(under_way) : number + _AHEAD]:
            under_way.append(parsers.submit(later.name, partial(open_file, later)))
        try:
            yield file, _parsed(file, under_way.popleft(), parsers)
        except DocumentError as error:
            yield file, error


def _parsed(file: FoundFile, parsing: Future[Parsed], parsers: ParserPool) -> Parsed:
    """Raises DocumentError when it cannot be a document, or ends its parser again and again."""
    for _ in range(MAX_TRIES):
        try:
            return parsing.result()
        except ParserLost:
            parsing = parsers.submit(file.name, partial(open_file, file))
    raise DocumentError(
        f"{file.path}: its reader was killed {MAX_TRIES} times; see whether memory is short, or split it."
    )


def open_file(file: FoundFile) -> BinaryIO:
    """Raises DocumentError for what is not a file that can be read, or another than was found."""
    path = file.path
    try:
        opened = _descriptor(file)
        status = os.fstat(opened)
        if stat.S_ISREG(status.st_mode) and (not file.root or file.identity == (status.st_dev, status.st_ino)):
            return os.fdopen(opened, "rb")
        os.close(opened)
    except OSError as error:
        if file.root and error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _exchanged(path) from error
        raise DocumentError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    except ValueError as error:  # a NUL in the path
        raise DocumentError(f"{str(path)!r} is not a path.") from error
    if stat.S_ISREG(status.st_mode):
        raise _exchanged(path)
    raise DocumentError(f"{path} is not a regular file; give files of {NAMED_KINDS}, or folders of them.")


def _descriptor(file: FoundFile) -> int:
    """An open file, without waiting for a writer. Below a folder each part of the path is opened from the one before,
    so that nobody can lead out of it by a link meanwhile; where the system cannot, the caller compares what it is."""
    if file.root is None or os.open not in os.supports_dir_fd:
        return os.open(file.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    *folders, name = file.path.relative_to(file.root).parts
    here = os.open(file.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part, flag in [*((folder, os.O_DIRECTORY) for folder in folders), (name, os.O_NONBLOCK)]:
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flag, dir_fd=here)
            os.close(here)
            here = inner
    except OSError:
        os.close(here)
        raise
    return here


def _exchanged(path: Path) -> DocumentError:
    return DocumentError(f"{path} was exchanged for another file while files were read; add it again.")


def find_files(paths: Iterable[Path]) -> tuple[list[FoundFile], list[IngestResult]]:
    """Files to read: the named ones, and every file of a known kind below named folders, in order of name; and the
    outcomes of all others.

    A named path that is missing or of another kind is a failure, and so is a folder that cannot be entered.
    """
    found = [item for path in paths for item in _found(path)]
    files = [item for item in found if isinstance(item, FoundFile)]
    return files, [item for item in found if isinstance(item, IngestResult)]


def _found(path: Path) -> list[FoundFile | IngestResult]:
    name = readable(str(path))
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return [IngestResult(name, "failed", note="cannot be read; check the path and its permissions")]
    if is_folder:
        return list(_walk(path.resolve()))
    if not exists:
        return [IngestResult(name, "failed", note="does not exist; check the path")]
    if kind_of(path.name) is None:
        return [IngestResult(name, "failed", note=f"not of a kind that can be read; convert it to {NAMED_KINDS}")]
    return [_found_file(path, readable(path.name))]


def _walk(root: Path) -> Iterator[FoundFile | IngestResult]:
    """All files below a folder, each as found or skipped. Links are not followed."""
    unreadable: list[OSError] = []
    for folder, subfolders, names in os.walk(root, onerror=unreadable.append):
        here = Path(folder)
        for name in sorted(subfolders):
            reason = _reason_to_skip(here / name, root)
            if reason:
                subfolders.remove(name)
                yield IngestResult(_name_below(here / name, root), "skipped", note=reason)
        subfolders.sort()
        for name in sorted(names):
            path = here / name
            reason = _reason_to_skip(path, root)
            if not reason and kind_of(name) is None:
                reason = f"not {NAMED_KINDS}"
            below = _name_below(path, root)
            yield IngestResult(below, "skipped", note=reason) if reason else _found_file(path, below, root)
    for error in unreadable:
        yield IngestResult(_name_below(Path(error.filename), root), "failed", note=f"cannot be read: {error.strerror}")


def _reason_to_skip(path: Path, root: Path) -> str:
    """Why an entry is not read; "" for one that is."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():
        inside = Path(os.path.realpath(path)).is_relative_to(root)
        return (
            "a link; what it points to is read under its own name" if inside else "a link that leads out of the folder"
        )
    return ""


def _name_below(path: Path, root: Path) -> str:
    return readable(path.relative_to(root).as_posix())


def is_gone(source: str) -> bool:
    """True if no file has this path any more, itself and not by a link. False where that cannot be seen."""
    if "\ufffd" in source:  # of a path that is not shown whole; what looks like it may be it
        return not glob(escape(source).replace("\ufffd", "*"))
    try:
        status = os.lstat(source)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return not stat.S_ISREG(status.st_mode) or os.path.realpath(source) != source


def readable(name: str) -> str:
    """Replace the bytes of a file name that are not UTF-8, since they can be neither stored nor shown."""
    return os.fsencode(name).decode("utf-8", "replace")
