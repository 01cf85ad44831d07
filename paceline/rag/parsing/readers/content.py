"""What every reader shares: its result, the text under construction, which cannot outgrow its limit, bytes of unknown
character set to text with LF line ends, zip containers, and kinds by their first bytes.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal
from zipfile import BadZipFile, ZipFile

from paceline.rag.parsing.kinds import EMPTY, MAX_TEXT_BYTES, MAX_TITLE, Kind

# Letters of one sign, as fonts draw them, and hyphens that are shown at a line's end alone.
LIGATURES = str.maketrans({
    "\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl", "\ufb05": "st", "\ufb06": "st",
    "\u00ad": "",
})  # fmt: skip
NO_TEXT = "has no text; if its pages are images, recognise their text first and save that as PDF"
FailureCode = Literal["unsupported_file", "invalid_file"]  # OpenAI's, in `last_error` of a vector store's file


class UnreadableError(Exception):
    """A document that cannot be read. The message follows the document's name: "is empty; leave it out"."""

    def __init__(self, reason: str, code: FailureCode = "unsupported_file") -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


@dataclass(frozen=True, slots=True)
class ReadText:
    """A document's text. `pages`: where each page begins in it; empty for kinds without pages."""

    title: str
    text: str
    pages: tuple[int, ...] = ()


def too_long() -> UnreadableError:
    return UnreadableError(
        f"has a text larger than {MAX_TEXT_BYTES // 2**20} MiB; split it into smaller files", "invalid_file"
    )


def one_line(text: str) -> str:
    """A title from a text with any blanks; "" when it is too long to be one."""
    line = " ".join(text[: 16 * MAX_TITLE].split())
    return line if len(line) <= MAX_TITLE else ""


class TextBuilder:
    """Paragraphs, headings and rows as Markdown. Runs of blanks become one; breaks are written before the next text."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.num_characters = 0
        self._newlines = 0  # to write before the next text
        self._blank = False  # a blank to write before the next text
        self._mark = ""  # of a heading or list item, to write before the next text

    def text(self, text: str) -> None:
        words = (text if text.isascii() else text.translate(LIGATURES)).split()
        if not words:
            self._blank = self._blank or bool(text)
            return
        self._blank = self._blank or text[0].isspace()
        self._put(" ".join(words))
        self._blank = text[-1].isspace()

    def verbatim(self, text: str) -> None:
        """Append text whose blanks and line ends mean something."""
        if text:
            self._put(text)

    def line(self, mark: str = "") -> None:
        """Begin a line, with a mark if any text follows."""
        self._begin(1, mark)

    def paragraph(self, mark: str = "") -> None:
        """Begin a paragraph, with a mark if any text follows."""
        self._begin(2, mark)

    @property
    def place(self) -> int:
        """Where what is written next will stand, for `rewrite`."""
        return len(self._parts)

    def rewrite(self, place: int, change: Callable[[str], str]) -> None:
        """Replace what was written since, but for the breaks before it, by what `change` makes of it."""
        written = "".join(self._parts[place:])
        kept = written[: len(written) - len(written.lstrip("\n"))]
        self.num_characters -= len(written)
        self._parts[place:] = []
        newlines, blank, mark = self._newlines, self._blank, self._mark
        self._newlines, self._blank, self._mark = len(kept), False, ""
        if changed := change(written[len(kept) :]):
            self._put(changed)
        self._newlines, self._blank, self._mark = newlines, blank, mark

    def build(self, nothing: str = "") -> str:
        """The whole text. Where there is none, raises UnreadableError with `nothing`, if that is given."""
        if nothing and not self.num_characters:
            raise UnreadableError(nothing)
        return "".join(self._parts)

    def _begin(self, newlines: int, mark: str) -> None:
        self._newlines = max(self._newlines, newlines)
        self._blank = False
        self._mark = mark

    def _put(self, text: str) -> None:
        before = "\n" * self._newlines if self._parts else ""
        if not before and self._blank and self._parts:
            before = " "
        piece = f"{before}{self._mark}{text}"
        self._newlines, self._blank, self._mark = 0, False, ""
        self.num_characters += len(piece)
        if self.num_characters > MAX_TEXT_BYTES:
            raise too_long()
        self._parts.append(piece)


# ---- character sets -------------------------------------------------------------------------------------------------
_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SHIFT = b"\x1b$"  # begins Japanese between ASCII, as in e-mail
_CODECS = ("utf-8", "cp", "iso8859", "iso2022", "hz", "koi8", "shift", "euc", "gb", "big5", "mac", "tis")
# What text of before Unicode is written in, per region; more candidates make short texts ambiguous.
_LEGACY = ["cp1252", "cp1250", "cp1251", "koi8_r", "iso8859_2", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr"]
_SAMPLE = 4096  # bytes in which zeros tell of UTF-16 without a mark
_UNUSED = frozenset("\0\1\2\3\4\5\6\7\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1c\x1d\x1e\x1f")
_MAX_UNUSED = 0.01  # share of such control characters in a text
_BINARY = "looks like a binary file; convert it to text or PDF first"


def decode(data: bytes, declared: str = "") -> str:
    """The text, in the character set of its mark, else the declared one, else the likeliest.

    Raises UnreadableError for what is no text in any, is empty, or is too long.
    """
    if not data:
        raise UnreadableError(EMPTY, "invalid_file")
    if len(data) > 4 * MAX_TEXT_BYTES:  # in no character set is it shorter
        raise too_long()
    text = _decoded(data, declared)
    if _is_binary(text):
        raise UnreadableError(_BINARY)
    if len(text) > MAX_TEXT_BYTES or len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise too_long()
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UnreadableError(EMPTY)
    return text


def _decoded(data: bytes, declared: str) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError as error:
                raise UnreadableError(
                    f"is damaged: its first bytes mark it as {error.encoding}, which ends at byte {error.start}",
                    "invalid_file",
                ) from None
    shifted = "iso2022_jp_2" if _SHIFT in data and data.isascii() else ""
    for encoding in (_known(declared), _of_zeros(data[:_SAMPLE]), shifted, "utf-8"):
        if encoding:
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                continue
    if b"\0" in data:  # in none of the older character sets
        raise UnreadableError(_BINARY)
    return _guessed(data)


def _known(declared: str) -> str:
    """The codec of a declared character set; "" for an unknown one. As for browsers, Latin-1 means cp1252, and UTF-16
    is not believed, since the declaration itself could be read as ASCII.
    """
    try:
        name = codecs.lookup(declared).name if declared.isascii() and declared.isprintable() else ""
    except (LookupError, ValueError):
        return ""
    if name in ("iso8859-1", "ascii"):
        return "cp1252"
    return name if name.startswith(_CODECS) else ""


def _of_zeros(sample: bytes) -> str:
    """UTF-16 without a mark: text of most languages has a zero in every other byte."""
    zeros = (sample[0::2].count(0), sample[1::2].count(0))
    if sum(zeros) * 5 < len(sample) or min(zeros) * 10 > max(zeros):
        return ""
    return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"


def _guessed(data: bytes) -> str:
    from charset_normalizer import from_bytes

    matches = list(from_bytes(data, cp_isolation=_LEGACY))
    if not matches:
        raise UnreadableError(_BINARY)
    best = matches[0]
    for match in matches:  # among equals, the character set of western Windows, which is by far the most frequent
        if match.encoding == "cp1252" and match.chaos <= best.chaos and match.coherence >= best.coherence:
            best = match
    return str(best)


def _is_binary(text: str) -> bool:
    if "\0" in text:
        return True
    return sum(map(text.count, _UNUSED)) > _MAX_UNUSED * len(text)


# ---- zip containers, judged by their table of contents before anything in them is unpacked --------------------------
# Sizes that the table understates do no harm: a member is never unpacked beyond the size it declares.
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


# ---- the kind of a document by its first bytes, whatever its name claims, and advice for kinds that are not read ----
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
    "application/vnd.oasis.opendocument.presentation": "odt",
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
