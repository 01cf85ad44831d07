"""A document as read, the rules of its name, and texts that are read without a parser process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import BinaryIO

from paceline.core.printable import printable
from paceline.errors import DocumentError
from paceline.rag.parsing.kinds import EMPTY, MAX_TEXT_BYTES, Kind, kind_of
from paceline.rag.parsing.readers.content import UnreadableError
from paceline.rag.parsing.readers.sniffing import kind_by_content
from paceline.rag.parsing.readers.text import read_text, title_of

MAX_NAME = 255  # characters; the limit of file systems
_PLAIN: frozenset[Kind] = frozenset({"text", "markdown", "code", "log"})  # which no library reads
_PLAIN_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Parsed:
    """One document as read. `text` has LF line ends and includes the title line."""

    name: str  # file name, or path relative to the given folder, with "/"
    title: str  # "" when it has none
    text: str
    sha256: str  # hex, of the UTF-8 of `text`: line ends do not change it
    kind: Kind = "markdown"
    pages: tuple[int, ...] = ()  # where each page begins in `text`, in characters; empty where there are none


def parsed(name: str, title: str, text: str, kind: Kind, pages: tuple[int, ...] = ()) -> Parsed:
    return Parsed(name, title, text, hashlib.sha256(text.encode()).hexdigest(), kind, pages)


def check_name(name: str) -> None:
    """Raise DocumentError for a misleading document name. Names are shown to users and never used as paths."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise DocumentError(
            f"{name[:MAX_NAME]!r} cannot name a document: use 1 to {MAX_NAME} printable characters, so rename the file."
        )
    if name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise DocumentError(f"{name!r} cannot name a document: give a plain name such as notes.md.")


def parsed_text(name: str, text: str) -> Parsed:
    """Raises DocumentError when it cannot be a document."""
    check_name(name)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise DocumentError(f"{name} is not UTF-8: its character {error.start} is half of a surrogate pair.") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise DocumentError(f"{name} is larger than {MAX_TEXT_BYTES >> 20} MiB; split it into smaller texts.")
    if "\0" in text:
        raise DocumentError(f"{name} looks like a binary file; give a text.")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"{name} {EMPTY}.")
    kind: Kind = "code" if kind_of(name) == "code" else "markdown"
    return parsed(name, title_of(name, text), text, kind)


def plain_text(name: str, document: BinaryIO) -> Parsed | None:
    """A small text in UTF-8, read as its parser would; None for every other file, and for what cannot be read."""
    kind = kind_of(name)
    if kind not in _PLAIN:
        return None
    try:
        document.seek(0)
        data = document.read(_PLAIN_BYTES + 1)
        # Before its kind is looked for: what has no zeros is no archive, of which parts would be unpacked here.
        if len(data) > _PLAIN_BYTES or b"\0" in data or kind_by_content(data, kind) != kind:
            return None
        data.decode()  # an older character set is guessed by a library
        content = read_text(data, name)
    except (UnreadableError, UnicodeDecodeError, OSError):
        return None
    check_name(name)
    return parsed(name, printable(content.title).strip(), content.text, kind)
