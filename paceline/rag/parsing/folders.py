"""Finding files: the named ones, and below named folders every file of a kind that can be read.

Links are not followed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, DocumentError, ParserLost
from paceline.rag.parsing.kinds import NAMED_KINDS, kind_of
from paceline.rag.parsing.parsed import MAX_NAME, Parsed
from paceline.rag.parsing.process import MAX_TRIES, ParserProcess


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to read."""

    path: Path
    name: str  # the document's name, unless another file's document has it
    explicit: bool = False  # named by the caller, not found in a folder

    @property
    def source(self) -> bytes:
        """The file's identity, however it was named: the absolute path without links, as the file system stores it."""
        return os.fsencode(os.path.realpath(self.path))

    def names(self) -> Iterator[str]:
        """Candidate names for the document: its own, then with more and more of its folders, last with a hash of its
        path. None is longer than MAX_NAME, unless the file's own name is.
        """
        yield self.name
        whole = _readable(os.path.realpath(self.path)).strip("/")
        parts = whole.split("/")
        for first in range(len(parts) - len(self.name.split("/")) - 1, -1, -1):
            name = "/".join(parts[first:])
            if len(name) <= MAX_NAME:
                yield name
        path_hash = hashlib.sha256(self.source).hexdigest()[:12]
        yield f"{path_hash}/{self.name}"[:MAX_NAME]


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry of a folder that is not read, and the reason."""

    name: str
    reason: str


def read_file(file: FoundFile, parser: ParserProcess) -> Parsed:
    """Parse a file, again if the parser is killed meanwhile. Raises DocumentError when it cannot be a document."""
    path = file.path
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DocumentError(f"{path} is not a regular file; give files of {NAMED_KINDS}, or folders of them.")
        document = path.open("rb")
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    except ValueError as error:  # a NUL in the path
        raise DocumentError(f"{str(path)!r} is not a path.") from error
    with document:
        for _ in range(MAX_TRIES):
            try:
                return parser.parse(file.name, document)
            except ParserLost:
                continue
    raise DocumentError(f"{path}: its reader was killed {MAX_TRIES} times; see whether memory is short, or split it.")


def find_files(paths: Iterable[Path]) -> tuple[list[FoundFile], list[Skipped]]:
    """Files to read: the named ones, and every file of a known kind below named folders, in order of name.

    Raises ConfigError for a named path that is missing or of another kind, and when there is nothing to read.
    """
    files: list[FoundFile] = []
    skipped: list[Skipped] = []
    for path in paths:
        try:
            is_folder, exists = path.is_dir(), path.exists()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise ConfigError(f"{str(path)!r} cannot be read. Check the path and its permissions.") from error
        if is_folder:
            found = list(_walk(path.resolve()))
            files += [item for item in found if isinstance(item, FoundFile)]
            skipped += [item for item in found if isinstance(item, Skipped)]
        elif not exists:
            raise ConfigError(f"{path} does not exist. Check the path.")
        elif kind_of(path.name) is None:
            raise ConfigError(f"{path} is not of a kind that can be read; convert it to {NAMED_KINDS}.")
        else:
            files.append(FoundFile(path, _readable(path.name), explicit=True))
    if not files:
        raise ConfigError(f"Nothing to read there: give files of {NAMED_KINDS}, or folders of them.")
    return files, skipped


def _walk(root: Path) -> Iterator[FoundFile | Skipped]:
    """All files below a folder, each as found or skipped. Links are not followed."""
    unreadable: list[OSError] = []
    for folder, subfolders, names in os.walk(root, onerror=unreadable.append):
        here = Path(folder)
        for name in sorted(subfolders):
            reason = _reason_to_skip(here / name, root)
            if reason:
                subfolders.remove(name)
                yield Skipped(_name_below(here / name, root), reason)
        subfolders.sort()
        for name in sorted(names):
            path = here / name
            reason = _reason_to_skip(path, root)
            if not reason and kind_of(name) is None:
                reason = f"not {NAMED_KINDS}"
            below = _name_below(path, root)
            yield Skipped(below, reason) if reason else FoundFile(path, below)
    for error in unreadable:
        yield Skipped(_name_below(Path(error.filename), root), f"cannot be read: {error.strerror}")


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
    return _readable(path.relative_to(root).as_posix())


def _readable(name: str) -> str:
    """Replace the bytes of a file name that are not UTF-8, since they can be neither stored nor shown."""
    return os.fsencode(name).decode("utf-8", "replace")
