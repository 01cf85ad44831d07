"""A text that the program has as such: titled like a file of that name, and not parsed."""

from __future__ import annotations

from paceline.errors import DocumentError
from paceline.rag.parsing.kinds import EMPTY, MAX_TEXT_BYTES, Kind, kind_of
from paceline.rag.parsing.parsed import Parsed, check_name, parsed
from paceline.rag.parsing.readers.plain import title_of


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
