"""The kind of a document by its first bytes, whatever its name claims, and advice for kinds that are not read."""

from __future__ import annotations

from paceline.rag.parsing.kinds import Kind
from paceline.rag.parsing.readers.archive import open_archive
from paceline.rag.parsing.readers.content import UnreadableError

_ZIP = b"PK\x03\x04"
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is an old Office file, or a protected one; save it as DOCX or PDF"),
    (b"{\\rtf", "is an RTF file; save it as DOCX or PDF"),
    (b"\x89PNG", "is an image; recognise its text first and save that as PDF or text"),
    (b"\xff\xd8\xff", "is an image; recognise its text first and save that as PDF or text"),
    (b"GIF8", "is an image; recognise its text first and save that as PDF or text"),
    (b"\x1f\x8b", "is compressed; unpack it and give the files in it"),
    (b"BZh", "is compressed; unpack it and give the files in it"),
    (b"\xfd7zXZ", "is compressed; unpack it and give the files in it"),
    (b"7z\xbc\xaf", "is an archive; unpack it and give the files in it"),
    (b"%!PS", "is a PostScript file; save it as PDF"),
    (b"\x7fELF", "is a program; only documents can be read"),
    (b"SQLite format 3\0", "is a database; export it as CSV"),
)
_PDF_WITHIN = 1024  # bytes; PDF readers accept other bytes before the header


def kind_by_content(data: bytes, claimed: Kind | None) -> Kind:
    """The kind to read it as. Raises UnreadableError for kinds that are not read."""
    if b"%PDF-" in data[:_PDF_WITHIN] and (claimed == "pdf" or data.lstrip()[:5] == b"%PDF-"):
        return "pdf"
    if data.startswith(_ZIP):
        return _kind_of_archive(data)
    for mark, advice in _OTHERS:
        if data.startswith(mark):
            raise UnreadableError(advice)
    if claimed in ("pdf", "docx", "pptx", "epub"):
        if not data:
            raise UnreadableError("is empty; write something in it or leave it out", "invalid_file")
        raise UnreadableError(f"is named as a {claimed.upper()} file and is none; export it again", "invalid_file")
    if claimed is None and data[:256].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "html"
    return claimed or "markdown"


def _kind_of_archive(data: bytes) -> Kind:
    names = set(open_archive(data).namelist())
    if "word/document.xml" in names:
        return "docx"
    if "ppt/presentation.xml" in names:
        return "pptx"
    if "META-INF/container.xml" in names:
        return "epub"
    if any(name.startswith("xl/") for name in names):
        raise UnreadableError("is a spreadsheet; save its sheets as CSV")
    if "content.xml" in names:
        raise UnreadableError("is an OpenDocument file; save it as DOCX or PDF")
    raise UnreadableError("is an archive; unpack it and give the files in it")
