"""Parsing: find files, and read UTF-8 text or Markdown into a title and a text.

Rejects other encodings, binary, empty and very large files with advice. Knows nothing of chunks. Not handled: other
formats, front matter, footnotes; Markdown stays as written.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.rag.chunk import FULL_STOPS

SUFFIXES = (".txt", ".md", ".markdown")
MAX_BYTES = 10 * 1024 * 1024  # per document; a 10 MiB text has about 4,000 pages
MAX_NAME = 255  # characters; the limit of file systems
MAX_TITLE = 120  # characters; a longer first line is a paragraph
_SETEXT = re.compile(r"(=+|-{2,})[ \t]*")


@dataclass(frozen=True, slots=True)
class Parsed:
    """One document as read. `text` has LF line ends and includes the title line."""

    name: str  # file name, or path relative to the given folder, with "/"
    title: str  # "" when it has none
    text: str
    sha256: str  # hex, of the UTF-8 of `text`: line ends do not change it


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


def read_file(file: FoundFile) -> Parsed:
    """Read and parse a file. Raises ConfigError when it cannot be a document."""
    path = file.path
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a regular file; give a text or Markdown file, or a folder of them.")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)  # not stat's size: the file may grow
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{str(path)!r} is not a path.") from error
    return parse(file.name, data)


def parse(name: str, data: bytes) -> Parsed:
    """Parse a document's bytes. Raises ConfigError when they cannot be a document."""
    check_name(name)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name} is larger than {MAX_BYTES // 2**20} MiB; split it into smaller files.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 (byte {error.start}); if it is text, save it as UTF-8, "
            "for instance with: iconv -f latin1 -t utf-8"
        ) from error
    if "\0" in text:
        raise ConfigError(f"{name} looks like a binary file; only text and Markdown can be read, so convert it first.")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise ConfigError(f"{name} is empty; write something in it or leave it out.")
    return Parsed(name, title_of(name, text), text, hashlib.sha256(text.encode()).hexdigest())


def check_name(name: str) -> None:
    """Raise ConfigError for a misleading document name. Names are shown to users and never used as paths."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ConfigError(
            f"{name[:MAX_NAME]!r} cannot name a document: use 1 to {MAX_NAME} printable characters, so rename the file."
        )
    if name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ConfigError(f"{name!r} cannot name a document: give a plain name such as notes.md.")


def title_of(name: str, text: str) -> str:
    """The title: a Markdown heading at the very beginning, else a short first line followed by a blank one, else ""."""
    lines = text.lstrip().split("\n", 2)
    first, second = lines[0].strip(), lines[1].strip() if len(lines) > 1 else ""
    if Path(name).suffix.lower() != ".txt":
        heading = _heading(first)
        if heading is not None:
            return heading[:MAX_TITLE]
        if first and _SETEXT.fullmatch(second):
            return first[:MAX_TITLE]
    alone = len(lines) > 2 and not second
    return first if alone and len(first) <= MAX_TITLE and first[-1] not in f".!?:;,{FULL_STOPS}" else ""


def _heading(line: str) -> str | None:
    """The text of an ATX heading (CommonMark 4.2); None if the line is not a heading.

    Not a regular expression: matching the closing marks would backtrack over each run of blanks while `re` holds the
    interpreter's lock, so a long first line would block the whole process.
    """
    text = line.lstrip("#")
    if not 1 <= len(line) - len(text) <= 6 or not text.startswith((" ", "\t")):
        return None
    text = text.strip(" \t")
    without_marks = text.rstrip("#")
    return without_marks.rstrip(" \t") if without_marks.endswith((" ", "\t")) or not without_marks else text


def find_files(paths: Iterable[Path]) -> tuple[list[FoundFile], list[Skipped]]:
    """Files to read: the named ones, and every text or Markdown file below named folders, in order of name.

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
        elif path.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"{path} is not of a kind that can be read; convert it to one of {', '.join(SUFFIXES)}.")
        else:
            files.append(FoundFile(path, _readable(path.name), explicit=True))
    if not files:
        raise ConfigError(f"Nothing to read there: give files or folders with {', '.join(SUFFIXES)} files in them.")
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
            if not reason and path.suffix.lower() not in SUFFIXES:
                reason = f"not one of {', '.join(SUFFIXES)}"
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
