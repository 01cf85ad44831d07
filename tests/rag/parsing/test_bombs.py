"""Small files that would become huge or endless: each is refused with a sentence, and the next document is read.

Times and memory are the kernel's business, so nothing here looks at a clock; small limits keep the tests short.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest

from paceline.errors import DocumentError
from paceline.rag.parsing.kinds import MAX_FILE_BYTES, Limits
from paceline.rag.parsing.process import ParserProcess
from tests.rag.parsing.made import CONTAINER, archive, book, pdf, shown, workbook

pytestmark = pytest.mark.slow

MIB = 2**20
LAUGHS = b"<!DOCTYPE x [<!ENTITY a0 'ha'>%s]>" % b"".join(
    b"<!ENTITY a%d '%s'>" % (i, b"&a%d;" % (i - 1) * 10) for i in range(1, 12)
)
FORMATS = b"http://schemas.openxmlformats.org"
TYPES = (
    b'<Types xmlns="%s/package/2006/content-types"><Override PartName="/word/document.xml" ContentType="%s"/></Types>'
    % (FORMATS, b"application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml")
)
RELATIONS = (
    b'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r" '
    b'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    b'Target="word/document.xml"/></Relationships>'
)


@pytest.fixture(scope="module")
def small() -> Iterator[ParserProcess]:
    with ParserProcess(Limits(memory_bytes=384 * MIB, cpu_s=2)) as parser:
        yield parser


def word(body: bytes, doctype: bytes = b"") -> bytes:
    space = b"http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    document = b'<?xml version="1.0"?>%s<w:document xmlns:w="%s"><w:body>%s</w:body></w:document>'
    parts = {"[Content_Types].xml": TYPES, "_rels/.rels": RELATIONS}
    return archive({**parts, "word/document.xml": document % (doctype, space, body)})


def understated(data: bytes) -> bytes:
    """An archive whose table of contents says of every member that it unpacks to ten bytes."""
    out, at = bytearray(data), 0
    while (at := data.find(b"PK\x01\x02", at)) >= 0:
        out[at + 24 : at + 28] = struct.pack("<I", 10)
        at += 4
    return bytes(out)


def pages_without_end() -> bytes:
    """A PDF whose tree of pages contains itself."""
    return pdf([shown("words")]).replace(b"/Kids [5 0 R]", b"/Kids [2 0 R]")


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


BOMBS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "zip of zeros": ("a.docx", lambda: archive({"word/document.xml": bytes(64 * MIB)}), "would unpack to 64 MiB"),
    "zip of many members": ("a.epub", lambda: archive({f"{i}": b"" for i in range(10_001)}), "in 10001 parts"),
    "zip that understates": (
        "a.epub",
        lambda: understated(archive({"META-INF/container.xml": CONTAINER + b" " * 8 * MIB})),
        "damaged",
    ),
    "XML entities in DOCX": ("a.docx", lambda: word(b"<w:p><w:r><w:t>&a11;</w:t></w:r></w:p>", LAUGHS), ""),
    "XML entities in EPUB": (
        "a.epub",
        lambda: archive({"META-INF/container.xml": LAUGHS + b"<container>&a11;</container>"}),
        "",
    ),
    "an entity that is a file": (
        "a.docx",
        lambda: word(
            b"<w:p><w:r><w:t>&f;</w:t></w:r></w:p>", b'<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]>'
        ),
        "defines XML entities",
    ),
    "EPUB of repeated chapters": (
        "a.epub",
        lambda: book({f"{i}": b"<p>" + b"word " * 10**6 for i in range(4)}, [str(i) for i in range(4)]),
        "split it",
    ),
    "a page that inflates": ("a.pdf", lambda: pdf([bytes(300 * MIB)], compressed=True), "too much memory"),
    "a page of too many words": ("a.pdf", lambda: pdf([shown("x") * 10**6], compressed=True), ""),
    "endless work": ("a.rtf", lambda: b"{\\rtf1 " + b"\\b" * 2**23, "too long to be read, more than 2 s"),
    "groups in groups": ("a.rtf", lambda: b"{\\rtf1 " + b"{" * 10**6, "too deep"),
    "a sheet with a cell far away": ("a.xlsx", lambda: workbook({"A1": "1", "XFD1048576": "2"}), "too much memory"),
    "a message of messages": ("a.eml", lambda: b"Subject: x\nContent-Type: message/rfc822\n\n" * 2000 + b"words", ""),
    "a message of parts": (
        "a.eml",
        lambda: b"Subject: x\nContent-Type: multipart/mixed; boundary=b\n\n" + b"--b\n\nx\n" * 10**5,
        "",
    ),
    "pages that contain themselves": ("a.pdf", pages_without_end, "damaged"),
    "a PDF of nested arrays": ("a.pdf", lambda: pdf([b"BT " + nested(10**6) + b" TJ ET"]), ""),
    "a PDF of 100,000 pages": ("a.pdf", lambda: pdf([b""] * 10**5), ""),
    "HTML of elements alone": ("a.html", lambda: b"<p>x" * 5 * 10**6, ""),
    "HTML that is deep": ("a.html", lambda: b"<div>" * 10**6, ""),
    "CSV with long names of columns": (
        "a.csv",
        lambda: b",".join(b"%d" % i + b"n" * 70 for i in range(1000)) + b"\n" + (b"x," * 999 + b"x\n") * 500,
        "split it",
    ),
    "CSV that is one field": ("a.csv", lambda: b'"' + b"a\n" * 5 * MIB, ""),
    "too large a file": ("a.pdf", lambda: b"%PDF-1.7" + bytes(MAX_FILE_BYTES), "larger than 64 MiB"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_or_read_within_the_limits(small: ParserProcess, kind: str) -> None:
    """Those without a sentence may be read in part, as long as they stay within the limits."""
    name, make, words = BOMBS[kind]
    try:
        text = small.parse_bytes(name, make()).text
    except DocumentError as error:
        assert words in str(error)
        assert str(error).endswith(".") and "\n" not in str(error)
    else:
        assert not words, text[:100]
        assert "hahaha" not in text and "root:" not in text
    assert small.parse_bytes("next.md", b"# Next").title == "Next"


def test_too_little_memory_is_said() -> None:
    with ParserProcess(Limits(memory_bytes=32 * MIB)) as tight, pytest.raises(DocumentError, match="more than 32 MiB"):
        tight.parse_bytes("a.txt", b"words " * MIB)
