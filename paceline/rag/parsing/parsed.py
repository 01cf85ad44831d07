"""A document as read, and the rules of its name. Knows nothing of files or of how it was parsed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from paceline.errors import DocumentError
from paceline.rag.parsing.kinds import Kind

MAX_NAME = 255  # characters; the limit of file systems


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
