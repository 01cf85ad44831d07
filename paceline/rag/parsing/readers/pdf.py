"""PDF by pypdf: the text of each page, and where each begins.

Not handled: text in images (it is said so), columns that the file stores out of order, forms, annotations.
"""

from __future__ import annotations

import io
import logging

from pypdf import PdfReader
from pypdf.errors import DependencyError

from paceline.rag.parsing.kinds import MAX_PAGES, MAX_TEXT_BYTES
from paceline.rag.parsing.readers.content import Content, UnreadableError, one_line, too_long

_JUNK = ("untitled", "microsoft word", "microsoft powerpoint", "about:blank")  # titles that programs make up


def read(data: bytes, name: str) -> Content:
    del name
    logging.disable(logging.CRITICAL)  # pypdf reports each fault of a file
    reader = PdfReader(io.BytesIO(data), strict=False)
    try:
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableError("is protected by a password; save a copy without one")
    except DependencyError:
        raise UnreadableError("is protected in a way that cannot be read; save a copy without protection") from None
    texts, failed = _pages(reader)
    if not any(texts):
        if failed:
            raise UnreadableError("is damaged: none of its pages can be read; export it again", "invalid_file")
        raise UnreadableError(
            f"has no text on its {len(texts)} page{'' if len(texts) == 1 else 's'}, so it is probably scanned; "
            "recognise its text first, for instance with: ocrmypdf in.pdf out.pdf"
        )
    whole = "\n\n".join(text for text in texts if text)
    starts, position = [], 0
    for text in texts:
        starts.append(min(position, len(whole)))  # a page without text begins where the next one does
        position += len(text) + 2 if text else 0
    return Content(_title(reader), whole, tuple(starts))


def _pages(reader: PdfReader) -> tuple[list[str], int]:
    """The text of each page, and the number of pages that could not be read."""
    texts: list[str] = []
    failed = size = 0
    for page in reader.pages:
        if len(texts) == MAX_PAGES:
            raise UnreadableError(f"has more than {MAX_PAGES:,} pages; split it into smaller files", "invalid_file")
        try:
            text = _clean(page.extract_text())
        except (MemoryError, RecursionError):
            raise
        except Exception:  # any, from a damaged page: the others may be whole
            failed += 1
            text = ""
        texts.append(text)
        size += len(text)
        if size > MAX_TEXT_BYTES:
            raise too_long()
    return texts, failed


def _clean(text: str) -> str:
    """Without trailing blanks and characters that cannot be shown."""
    shown = "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)
    return "\n".join(line.rstrip() for line in shown.split("\n")).strip()


def _title(reader: PdfReader) -> str:
    try:
        title = one_line(str((reader.metadata and reader.metadata.title) or ""))
    except Exception:  # any, from damaged metadata: a title is not needed
        return ""
    return "" if title.lower().startswith(_JUNK) else title
