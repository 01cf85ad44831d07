"""The kind of a document by its first bytes, whatever its name claims, and advice for kinds that are not read; and zip
containers, judged by their table of contents before anything in them is unpacked.

Sizes that the table understates do no harm: a member is never unpacked beyond the size it declares.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from zipfile import BadZipFile, ZipFile

from paceline.rag.parsing.kinds import EMPTY, Kind
from paceline.rag.parsing.readers.content import UnreadableError

# ---- zip containers -------------------------------------------------------------------------------------------------
MAX_MEMBERS = 10_000
MAX_UNPACKED = 256 * 2**20  # bytes, of all members together
MAX_RATIO = 200  # unpacked to packed, of all members together; XML of office programs is packed 5 to 50 times
_SMALL = 16 * 2**20  # bytes unpacked that are allowed at any ratio
_ENCRYPTED = 0x1  # in a member's flags


def open_archive(data: bytes) -> ZipFile:
    """Raises UnreadableError for a damaged or protected archive, and for one that would unpack to too much."""
    try:
        archive = ZipFile(io.BytesIO(data))
    except (BadZipFile, ValueError, NotImplementedError, OSError):
        raise UnreadableError("is a damaged archive; save or download it again", "invalid_file") from None
    members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS or unpacked > MAX_UNPACKED or unpacked > max(_SMALL, MAX_RATIO * len(data)):
        raise UnreadableError(
            f"would unpack to {unpacked >> 20} MiB in {len(members)} parts, too much for a document; remove what it "
            "embeds, or split it",
            "invalid_file",
        )
    if any(member.flag_bits & _ENCRYPTED for member in members):
        raise UnreadableError("is protected by a password; save a copy without one")
    return archive


def member(archive: ZipFile, name: str) -> bytes:
    """A member's bytes. Raises UnreadableError when it is missing or damaged."""
    try:
        return archive.read(name)
    except (KeyError, BadZipFile, EOFError, NotImplementedError, ValueError, OSError):
        raise UnreadableError(f"is damaged: its part {name[:80]!r} cannot be unpacked", "invalid_file") from None


# ---- kinds ----------------------------------------------------------------------------------------------------------
_ZIP = b"PK\x03\x04"
_OTHERS: Mapping[str, tuple[bytes, ...]] = {  # by what is said of them
    "is an image; recognise its text first and save that as PDF or text": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8"),
    "is compressed; unpack it and give the files in it": (b"\x1f\x8b", b"BZh", b"\xfd7zXZ"),
    "is an archive; unpack it and give the files in it": (b"7z\xbc\xaf",),
    "is a PostScript file; save it as PDF": (b"%!PS",),
    "is a program; only documents can be read": (b"\x7fELF",),
    "is a database; export it as CSV": (b"SQLite format 3\0",),
}
_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_PROTECTED = "EncryptedPackage".encode("utf-16-le")  # the name of what a protected file of today holds
_TEXT_OR_SLIDES = ("WordDocument".encode("utf-16-le"), "PowerPoint Document".encode("utf-16-le"))
_WORKBOOK = ("Workbook".encode("utf-16-le"), "Book".encode("utf-16-le"))
_FOLDERS: Mapping[str, Kind] = {"word/": "docx", "ppt/": "pptx", "xl/": "xlsx", "META-INF/container.xml": "epub"}
_OPEN_KINDS: Mapping[str, Kind] = {
    "application/vnd.oasis.opendocument.text": "odt",
    "application/vnd.oasis.opendocument.spreadsheet": "xlsx",
}
_PDF_WITHIN = 1024  # bytes; PDF readers accept other bytes before the header


def kind_by_content(data: bytes, claimed: Kind | None) -> Kind:
    """The kind to read it as. Raises UnreadableError for kinds that are not read."""
    if b"%PDF-" in data[:_PDF_WITHIN] and (claimed == "pdf" or data.lstrip()[:5] == b"%PDF-"):
        return "pdf"
    if data.startswith(_ZIP):
        return _kind_of_archive(data)
    if data.startswith(_OLD_OFFICE):
        return _kind_of_old_office(data)
    if data.startswith(b"{\\rtf"):
        return "rtf"
    for advice, marks in _OTHERS.items():
        if data.startswith(marks):
            raise UnreadableError(advice)
    is_html = data[:256].lstrip().lower().startswith((b"<!doctype html", b"<html"))
    if claimed == "xlsx" and is_html:  # what many programs call a spreadsheet
        return "html"
    if claimed in ("pdf", "docx", "pptx", "epub", "xlsx", "odt", "rtf"):
        if not data:
            raise UnreadableError(EMPTY, "invalid_file")
        raise UnreadableError(f"is named as a {claimed.upper()} file and is none; export it again", "invalid_file")
    return claimed or ("html" if is_html else "markdown")


def _kind_of_old_office(data: bytes) -> Kind:
    if _PROTECTED in data:
        raise UnreadableError("is protected by a password; save a copy without one")
    if any(name in data for name in _WORKBOOK) and not any(name in data for name in _TEXT_OR_SLIDES):
        return "xlsx"
    raise UnreadableError("is an old Office file; save it as DOCX or PDF")


def _kind_of_archive(data: bytes) -> Kind:
    archive = open_archive(data)
    names = set(archive.namelist())
    for folder, kind in _FOLDERS.items():
        if any(name.startswith(folder) for name in names):
            return kind
    if "content.xml" in names:
        said = member(archive, "mimetype") if "mimetype" in names else b""
        said_kind = said.decode("ascii", "replace").strip().removesuffix("-template")
        if said_kind not in _OPEN_KINDS:
            raise UnreadableError("is an OpenDocument file of a kind that is not read; save it as PDF")
        return _OPEN_KINDS[said_kind]
    if any(name.endswith(".iwa") for name in names):
        raise UnreadableError("is a file of Pages, Numbers or Keynote; export it as PDF, or its sheets as CSV")
    raise UnreadableError("is an archive; unpack it and give the files in it")
