"""RTF 1.9: the text with its paragraphs, headings, tables and notes; what is hidden or deleted is left out.

Not handled: pictures, embedded objects, characters of symbol fonts.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.rag.parsing.readers.content import NO_TEXT, ReadText, TextBuilder, UnreadableError, one_line
from paceline.rag.parsing.readers.text import with_named_cells

_TOKEN = re.compile(rb"\\([a-z]{1,32})(-?\d{1,10})? ?|\\'([0-9a-fA-F]{2})|\\([^a-z])|([{}])|[\r\n]+|([^\\{}\r\n]+)")
_MAX_DEPTH = 1000  # of groups in groups
_SIGNS = {
    "line": "\n", "tab": " ", "emdash": "\u2014", "endash": "\u2013", "emspace": " ", "enspace": " ",
    "bullet": "\u2022", "lquote": "\u2018", "rquote": "\u2019", "ldblquote": "\u201c", "rdblquote": "\u201d",
}  # fmt: skip
_ESCAPED = {b"~": " ", b"_": "-", b"-": "", b"\n": "\n", b"\r": "\n", b"\\": "\\", b"{": "{", b"}": "}"}
_LABELS = {"footnote": "Note: ", "annotation": "Comment: ", "shptxt": "", "header": "", "footer": ""}
_LABELS |= {f"{end}{pages}": "" for end in ("header", "footer") for pages in "lrf"}
_KEPT = frozenset((*_LABELS, "shpinst"))  # though they may be marked as what unknowing readers skip
_SKIPPED = frozenset((
    "colortbl", "stylesheet", "listtable", "listoverridetable", "revtbl", "pict", "objdata", "fldinst", "sp", "atnid",
    "atnauthor", "atnref", "atndate", "bkmkstart", "bkmkend", "listtext", "pntext", "nonshppict", "info",
))  # fmt: skip
_CHARSETS = {  # code pages by `fcharset` of a font
    77: "mac_roman", 128: "cp932", 129: "cp949", 134: "gb18030", 136: "big5", 161: "cp1253", 162: "cp1254",
    163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257", 204: "cp1251", 222: "cp874", 238: "cp1250",
}  # fmt: skip


def read_rtf(data: bytes, _name: str) -> ReadText:
    reader = _Reader()
    reader.feed(data)
    return ReadText(one_line(reader.title), reader.out.build(NO_TEXT))


@dataclass(slots=True)
class _Group:
    """What a group has from the one around it, and may change until it ends."""

    destination: str = ""
    is_skipped: bool = False
    hidden: frozenset[str] = frozenset()  # of `v` and `deleted`
    fallback: int = 1  # characters after each `u`, for readers without Unicode
    charset: str = "cp1252"
    outer: list[str] | None = None  # the text around a note, while that is read


@dataclass(slots=True)
class _Reader:
    out: TextBuilder = field(default_factory=TextBuilder)
    title: str = ""
    _group: _Group = field(default_factory=_Group)
    _stack: list[_Group] = field(default_factory=list)
    _fonts: dict[int, str] = field(default_factory=dict)
    _font: int = 0  # that is being defined
    _charset: str = "cp1252"  # of fonts without one
    _bytes: bytearray = field(default_factory=bytearray)  # that are not decoded yet: characters may have several
    _text: list[str] = field(default_factory=list)  # of the paragraph
    _cells: list[str] = field(default_factory=list)  # of the row
    _later: list[str] = field(default_factory=list)  # notes of the paragraph
    _in_table: bool = False
    _table: int | None = None  # where one begins that is being written
    _mark: str = ""  # of the paragraph: a heading or list item
    _left: int = 0  # characters to skip after a `u`
    _is_starred: bool = False

    def feed(self, data: bytes) -> None:
        at = 0
        while found := _TOKEN.search(data, at):
            at = found.end()
            word, number, code, escaped, brace, run = found.groups()
            if code is not None or run is not None:
                self._put_bytes(bytes.fromhex(code.decode()) if code is not None else run)
                continue
            self._decode()
            if brace == b"{":
                self._open()
            elif brace == b"}":
                self._close()
            elif escaped == b"*":
                self._is_starred = True
            elif escaped is not None and self._left:
                self._left -= 1
            elif escaped in (b"\n", b"\r"):
                self._control("par", None)
            elif escaped is not None:
                self._put(_ESCAPED.get(escaped, ""))
            elif word == b"bin":
                at += max(0, int(number or 0))
            elif word is not None:
                self._control(word.decode(), None if number is None else int(number))
        self._decode()
        self._end_paragraph()

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _open(self) -> None:
        if len(self._stack) == _MAX_DEPTH:
            raise UnreadableError("nests its groups too deep; save it as DOCX or PDF", "invalid_file")
        self._stack.append(self._group)
        self._group = replace(self._group, outer=None)
        self._left, self._is_starred = 0, False

    def _close(self) -> None:
        if self._group.outer is not None:
            note = "".join(self._text).strip()
            self._text = self._group.outer
            self._later += [_LABELS[self._group.destination] + note] if note else []
        if self._stack:
            self._group = self._stack.pop()
        self._left = 0

    def _control(self, word: str, number: int | None) -> None:
        group, is_starred = self._group, self._is_starred
        self._is_starred = False
        if word in _SKIPPED or word == "fonttbl" or (is_starred and word not in _KEPT):
            group.is_skipped, group.destination = True, word
            self._mark = self._mark or ("- " if word in ("listtext", "pntext") else "")
        elif word == "title" and group.destination == "info":
            group.destination = word
        elif word in _LABELS and not group.is_skipped:
            group.destination, group.outer, self._text = word, self._text, []
        elif word in ("v", "deleted"):
            group.hidden = group.hidden - {word} if number == 0 else group.hidden | {word}
        elif word == "plain":
            group.hidden = frozenset()
        elif word == "uc":
            group.fallback = max(0, number or 0)
        elif word == "u":
            self._put(chr((number or 0) & 0xFFFF))
            self._left = group.fallback
        elif word == "f":
            self._font = number or 0
            group.charset = self._fonts.get(self._font, self._charset)
        elif word == "fcharset" and number in _CHARSETS:
            self._fonts[self._font] = _CHARSETS[number]
        elif word in ("ansicpg", "mac"):
            self._charset = group.charset = _known("mac_roman" if word == "mac" else f"cp{number}")
        elif word in ("pard", "intbl"):
            self._in_table = word == "intbl"
            self._mark = "" if word == "pard" else self._mark
        elif word == "outlinelevel" and number is not None and 0 <= number < 9:
            self._mark = "#" * min(number + 1, 6) + " "
        elif not group.is_skipped:
            self._layout(word)

    def _layout(self, word: str) -> None:
        if word in ("cell", "nestcell"):
            self._cells.append(" ".join("".join(self._text).split()))
            self._text = []
        elif word in ("row", "nestrow"):
            self._table = self.out.place if self._table is None else self._table
            self.out.line()
            self.out.text(" | ".join(self._cells))
            self._cells = []
            self._write_notes()
        elif word in ("par", "sect", "page") and self._group.destination in _LABELS:
            self._put("\n")
        elif word in ("par", "sect", "page"):
            if self._in_table:
                self._put(" ")
            else:
                self._end_paragraph()
        elif word in _SIGNS:
            self._put(_SIGNS[word])

    def _put(self, text: str) -> None:
        if self._group.destination == "title":
            self.title += text
        elif not self._group.is_skipped and not self._group.hidden:
            self._text.append(text)

    def _put_bytes(self, data: bytes) -> None:
        skipped = min(self._left, len(data))
        self._left -= skipped
        self._bytes += data[skipped:]

    def _decode(self) -> None:
        if self._bytes:
            self._put(self._bytes.decode(self._group.charset, "replace"))
            self._bytes.clear()

    def _end_paragraph(self) -> None:
        if self._table is not None:
            self.out.rewrite(self._table, with_named_cells)
            self._table = None
        self._write(self._text, self._mark)
        self._text, self._mark = [], "" if self._mark.startswith("-") else self._mark
        self._write_notes()

    def _write_notes(self) -> None:
        later, self._later = self._later, []
        for note in later:
            self._write([note], "")

    def _write(self, text: Sequence[str], mark: str) -> None:
        whole = "".join(text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if not whole.strip():
            return
        (self.out.line if mark == "- " else self.out.paragraph)(mark)
        for number, line in enumerate(whole.split("\n")):
            if number:
                self.out.line()
            self.out.text(line)
        if mark != "- ":
            self.out.paragraph()


def _known(charset: str) -> str:
    try:
        return codecs.lookup(charset).name
    except LookupError:
        return "cp1252"
