"""Each kind of document, made here, as its text, title and pages; and what is refused, with advice."""

from __future__ import annotations

import io

import pptx
import pytest
from pypdf import PdfWriter

from paceline.errors import DocumentError
from paceline.rag.chunk import split
from paceline.rag.parsing.kinds import MAX_TEXT_BYTES, MAX_TITLE
from paceline.rag.parsing.process import ParserProcess, check_name, parsed_text
from paceline.rag.parsing.readers import pdf as pdf_reader
from tests.rag.parsing.made import archive, book, pdf, presentation, scanned, shown, word_document


def refusal(parser: ParserProcess, name: str, data: bytes) -> tuple[str, str]:
    with pytest.raises(DocumentError) as caught:
        parser.parse_bytes(name, data)
    return caught.value.code, str(caught.value)


# ---- text -----------------------------------------------------------------------------------------------------------
def test_a_byte_order_mark_and_other_line_ends_do_not_change_the_document(parser: ParserProcess) -> None:
    plain = parser.parse_bytes("a.txt", b"One.\nTwo.\n")
    assert parser.parse_bytes("a.txt", b"\xef\xbb\xbfOne.\r\nTwo.\r") == plain
    assert plain.text == "One.\nTwo.\n"


TITLES = [
    ("a.md", "# Museum of Harl\n\nIt opens at nine.", "Museum of Harl"),
    ("a.md", "\n\n## Hours ##\ntext", "Hours"),
    ("a.md", "#NoHeading\ntext", ""),
    ("a.md", "Museum\n======\ntext", "Museum"),
    ("a.md", "Museum\n---\ntext", "Museum"),
    ("a.md", "# " + "x" * 500, "x" * MAX_TITLE),
    ("a.txt", "# not Markdown\nin a text file", ""),
    ("a.txt", "Museum of Harl\n\nIt opens at nine.", "Museum of Harl"),
    ("a.txt", "It opens at nine.\n\nA sentence is no title.", ""),
    ("a.txt", "\u661f\u306f\u8d64\u3044\u3002\n\nmore", ""),
    ("note", "# A file without an end is Markdown\n", "A file without an end is Markdown"),
    ("lamp.py", "# A comment\n\nlit = True\n", "lamp.py"),
]


@pytest.mark.parametrize(("name", "text", "title"), TITLES)
def test_the_title_is_a_heading_or_a_short_separate_first_line(
    parser: ParserProcess, name: str, text: str, title: str
) -> None:
    assert parser.parse_bytes(name, text.encode()).title == title
    assert parsed_text(name, text).title == title


SENTENCES = {
    "cp1252": "Le café est fermé à Noël; l'été prochain, il ouvrira à neuf heures.",
    "latin-1": "Die Grüße aus Köln: die Bücherei öffnet um neun.",
    "cp1250": "Zażółć gęślą jaźń. Muzeum otwiera się o dziewiątej rano.",
    "cp1251": "Музей открывается в девять часов утра, вход свободный.",
    "koi8-r": "Музей открывается в девять часов утра, вход свободный.",
    "iso-2022-jp": "図書館は朝九時に開きます。入場は無料です。",
    "shift_jis": "図書館は朝九時に開きます。入場は無料です。",
    "utf-16": "Grüße, 図書館, 🎈",
    "utf-32": "Grüße, 図書館, 🎈",
    "utf-8-sig": "Grüße, 図書館, 🎈",
    "utf-16-le": "Grüße und mehr",  # without a mark
    "utf-16-be": "Grüße und mehr",
}


@pytest.mark.parametrize("charset", SENTENCES)
def test_text_is_read_in_the_character_set_it_is_written_in(parser: ParserProcess, charset: str) -> None:
    sentence = SENTENCES[charset]
    for name in ("a.txt", "a.md", "a.py"):
        assert parser.parse_bytes(name, sentence.encode(charset)).text == sentence
    table = f"name,note\nAnn,{sentence.split(',')[0]}\n".encode(charset)
    assert sentence.split(",")[0] in parser.parse_bytes("a.csv", table).text


def test_a_single_huge_line_is_read_and_split(parser: ParserProcess) -> None:
    for line in (b"x" * MAX_TEXT_BYTES, b"word " * (MAX_TEXT_BYTES // 5)):
        assert parser.parse_bytes("a.txt", line).text == line.decode()
    text = parser.parse_bytes("a.txt", b"x" * 100_000).text
    assert "".join(chunk.text for chunk in split(text, len, overlap=0)) == text


@pytest.mark.parametrize(
    "hostile",
    [
        b"# x" + b" " * (MAX_TEXT_BYTES - 10) + b"x",
        b"# x" + b" #" * (MAX_TEXT_BYTES // 2 - 10),
        b"#" * (MAX_TEXT_BYTES - 10),
        b"x\n" + b"=" * (MAX_TEXT_BYTES - 10) + b"x",
    ],
    ids=["blanks", "marks", "hashes", "setext"],
)
def test_the_largest_hostile_first_lines_stay_within_the_limits(parser: ParserProcess, hostile: bytes) -> None:
    """A parser that backtracks, even once per character, exceeds them."""
    assert len(parser.parse_bytes("notes.md", hostile).title) <= MAX_TITLE


# ---- tables and markup ----------------------------------------------------------------------------------------------
def test_rows_of_csv_carry_the_names_of_their_columns(parser: ParserProcess) -> None:
    wanted = "Name: Ann Bell; Town: Harl\nName: Bert; Town: Tarn, old"
    rows = [["Name", "Town"], ["Ann\nBell", "Harl"], ["Bert", "Tarn, old"]]
    for name, mark in (("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("a.csv", "|")):
        data = "\r\n".join(mark.join(f'"{cell}"' for cell in row) for row in rows)
        assert parser.parse_bytes(name, data.encode()).text == wanted
    assert parser.parse_bytes("a.csv", b"1,2\n3,4\n").text == "1 | 2\n3 | 4", "numbers are no header"
    assert parser.parse_bytes("a.csv", b"Name,Town\nAnn\n").text == "Name: Ann", "a short row"
    assert parser.parse_bytes("a.csv", b"Name,Town\n").text == "Name | Town"


HTML = """<!doctype html><html><head><title> The  Lamp </title><style>p {}</style><script>hidden()</script></head>
<body><h1>Lamps</h1><p>One <b>bold</b>\nword.<br>Next line.</p><ul><li>first<li>second</ul>
<table><tr><th>Town</th><th>Lamps</th></tr><tr><td>Harl</td><td>7</td></tr></table>
<pre>  kept
    as is</pre><h2>Oil</h2>It burns.<noscript>hidden</noscript><!-- hidden --> Yes.</body></html>"""


def test_html_becomes_what_is_shown_with_headings_lists_and_tables(parser: ParserProcess) -> None:
    read = parser.parse_bytes("a.html", HTML.encode())
    assert (read.title, read.kind) == ("The Lamp", "html")
    assert read.text == (
        "# Lamps\n\nOne bold word.\nNext line.\n\n- first\n- second\n\nTown | Lamps\nHarl | 7\n\n  kept\n    as is\n\n"
        "## Oil\n\nIt burns. Yes."
    )
    assert parser.parse_bytes("page", HTML.encode()) == parser.parse_bytes("page", HTML.encode())
    assert parser.parse_bytes("page", HTML.encode()).kind == "html", "by its content"
    assert "no text" in refusal(parser, "a.html", b"<script>write()</script>")[1]


@pytest.mark.parametrize(
    ("head", "charset"),
    [
        ('<meta charset="iso-8859-1">', "cp1252"),
        ("<META http-equiv=Content-Type content='text/html; charset=windows-1251'>", "cp1251"),
        ('<?xml version="1.0" encoding="koi8-r"?>', "koi8-r"),
        ('<meta charset="no-such-thing">', "utf-8"),
        ('<meta charset="utf-16">', "utf-8"),
        ('<meta charset="iso-2022-kr">', "iso-2022-kr"),
        (
            "<meta name=a><!-- <meta charset=koi8-r> --><script charset=cp1251></script><meta charset = utf-8>",
            "utf-8",
        ),
        ("", "utf-16"),
    ],
)
def test_html_is_read_in_the_character_set_it_declares(parser: ParserProcess, head: str, charset: str) -> None:
    said = {"cp1251": "Музей открыт", "koi8-r": "Музей открыт", "iso-2022-kr": "도서관은 아홉 시에 엽니다"}
    sentence = said.get(charset, "Grüße – café")
    data = f"{head}<html><body><p>{sentence}</p></body></html>".encode(charset)
    assert parser.parse_bytes("a.html", data).text == sentence


# ---- containers -----------------------------------------------------------------------------------------------------
def test_a_word_document_keeps_headings_lists_and_tables(parser: ParserProcess) -> None:
    read = parser.parse_bytes("rules.docx", word_document())
    assert (read.title, read.kind) == ("Harbour rules", "docx")
    assert read.text == (
        "# Moorings\n\nBoats moor on the north side.\n\n- Ropes\n- Fenders\n\nBerth | Fee\n7 | 12 marks\n\n"
        "## Fires\n\nNone on deck."
    )
    assert parser.parse_bytes("rules", word_document()).kind == "docx", "by its content"


def test_a_book_is_read_in_its_own_order(parser: ParserProcess) -> None:
    chapters = {"b.xhtml": b"<h1>Second</h1><p>It goes out.", "a.xhtml": b"<h1>First</h1><p>It is lit.", "c.xhtml": b""}
    read = parser.parse_bytes("lamp.epub", book(chapters, ["a.xhtml", "c.xhtml", "b.xhtml", "a.xhtml", "none"]))
    assert (read.title, read.kind) == ("The Lamp", "epub")
    assert read.text == "# First\n\nIt is lit.\n\n# Second\n\nIt goes out."


def test_a_pdf_keeps_its_pages(parser: ParserProcess) -> None:
    made = pdf([shown("The lamp is lit at six.", "By the keeper."), b"", shown("It goes out at nine.")], "Lamps")
    read = parser.parse_bytes("lamps.pdf", made)
    assert (read.title, read.kind) == ("Lamps", "pdf")
    assert read.text == "The lamp is lit at six.\nBy the keeper.\n\nIt goes out at nine."
    first, second = split(
        read.text, lambda text: len(text.split()), title=read.title, pages=read.pages, chunk_tokens=10, overlap=0
    )
    assert (first.title, second.title) == ("Lamps, page 1", "Lamps, page 3")
    (both,) = split(read.text, lambda text: len(text.split()), pages=read.pages)
    assert both.title == "pages 1–3"
    assert parser.parse_bytes("lamps", made).kind == "pdf", "by its content"


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_a_protected_pdf_is_read_if_it_opens_without_a_password(parser: ParserProcess, algorithm: str) -> None:
    def protected(user_password: str) -> bytes:
        writer = PdfWriter(clone_from=io.BytesIO(pdf([shown("The lamp is lit.")])))
        writer.encrypt(user_password, owner_password="owner", algorithm=algorithm)
        out = io.BytesIO()
        writer.write(out)
        return out.getvalue()

    assert parser.parse_bytes("a.pdf", protected("")).text == "The lamp is lit."
    code, sentence = refusal(parser, "a.pdf", protected("secret"))
    assert (code, sentence) == ("unsupported_file", "a.pdf is protected by a password; save a copy without one.")


# ---- refusals -------------------------------------------------------------------------------------------------------
def test_what_cannot_be_read_is_refused_with_advice(parser: ParserProcess) -> None:
    scanned, slides = pdf([b"", b""]), io.BytesIO()
    pptx.Presentation().save(slides)
    hidden = b'<encryption xmlns="urn:x"><CipherReference URI="OPS/a.xhtml"/></encryption>'
    locked = book({"a.xhtml": b"\x93\x01"}, ["a.xhtml"], {"META-INF/encryption.xml": hidden})
    advice = {
        ("scan.pdf", scanned): ("unsupported_file", "ocrmypdf"),
        ("a.pdf", b"Not at all."): ("invalid_file", "is named as a PDF file and is none"),
        ("a.pdf", b"%PDF-1.7 and no more"): ("invalid_file", "damaged"),
        ("a.pdf", pdf([shown("words")])[:300]): ("invalid_file", "damaged"),
        ("a.docx", archive({"word/document.xml": b"<w"})): ("invalid_file", "damaged"),
        ("a.docx", b"PK\x03\x04 and no more"): ("invalid_file", "damaged archive"),
        ("a.docx", archive({"xl/workbook.xml": b""})): ("invalid_file", "damaged spreadsheet"),
        ("a.pptx", archive({"ppt/presentation.xml": b""})): ("invalid_file", "damaged"),
        ("empty.pptx", slides.getvalue()): ("unsupported_file", "has no text"),
        ("a.odt", archive({"content.xml": b""})): ("unsupported_file", "OpenDocument"),
        ("a.zip", archive({"a.txt": b"words"})): ("unsupported_file", "unpack it"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)): ("unsupported_file", "save it as DOCX"),
        ("a.epub", locked): ("unsupported_file", "DRM"),
        ("a.epub", archive({"META-INF/container.xml": b"<container/>"})): ("invalid_file", "names no package"),
        ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256))): ("unsupported_file", "is an image"),
        ("a.txt", bytes(range(256)) * 40): ("unsupported_file", "binary"),
        ("a.txt", b"PK\0\0\0"): ("unsupported_file", "binary"),
        ("a.csv", b"\0\0,\0\0"): ("unsupported_file", "binary"),
        ("a.csv", b",,\n,,\n"): ("unsupported_file", "is empty"),
        ("a.txt", b"\xff\xfe\x00"): ("invalid_file", "damaged"),
        ("a.txt", b"\xff\xfe"): ("unsupported_file", "is empty"),
        ("a.txt", b""): ("invalid_file", "is empty"),
        ("a.pdf", b""): ("invalid_file", "is empty"),
        ("a.txt", b" \n\t\n"): ("unsupported_file", "is empty"),
        ("a.txt", b"a" * (MAX_TEXT_BYTES + 1)): ("invalid_file", "split it"),
    }
    for (name, data), (code, words) in advice.items():
        said = refusal(parser, name, data)
        assert said[0] == code and words in said[1], said
        assert said[1].startswith(f"{name} ") and said[1].endswith(".") and "\n" not in said[1]


@pytest.mark.parametrize(
    "name", ["", "../x", "a/../x", "/etc/x", "a//b", "./a", "a\0b", "a\nb", "a\x1b[2Jb", "..", "c:\\x", "x" * 256]
)
def test_a_name_that_could_mislead_is_refused(name: str) -> None:
    with pytest.raises(DocumentError, match="cannot name a document"):
        check_name(name)


# ---- slides and records ---------------------------------------------------------------------------------------------
def test_slides_are_read_with_their_tables_groups_and_notes(parser: ParserProcess) -> None:
    read = parser.parse_bytes("plans.pptx", presentation())
    assert (read.kind, read.title) == ("pptx", "Harbour plans")
    first, second = (read.text[start:end] for start, end in zip(read.pages, (read.pages[1], None), strict=True))
    assert first == "# Harbour plans\n\nFor the next year\n\n"
    assert second.startswith("# Fees")
    for part in ("Berth | Fee\n7 | 12 marks", "Paid at the gate.", "boats of the town pay nothing"):
        assert part in second


def test_a_scan_is_recognised_where_the_library_is_installed_and_told_of_elsewhere(parser: ParserProcess) -> None:
    data = scanned("The harbour office opens at seven.", "The fee for one night is 18 marks.")
    if any(map(pdf_reader._library, pdf_reader._TESSERACT)):
        assert "The fee for one night is 18 marks." in parser.parse_bytes("scan.pdf", data).text
    else:
        assert "ocrmypdf" in refusal(parser, "scan.pdf", data)[1]


RECORDS = {
    '{"name": "Ann", "address": {"city": "Harl", "no": 7}}': "name: Ann\naddress.city: Harl\naddress.no: 7",
    '[{"a": 1}, {"a": null, "b": ["x", "y"]}]': "[0]: a: 1\n\n[1]: a: null; b: x, y",
    '{"u": [{"a": {"b": 1, "c": "x\\ny"}}, {"a": [{"b": 2}]}]}': "u[0]: a.b: 1; a.c: x y\n\nu[1].a[0]: b: 2",
    '{"a": 1}\n\n{"a": true}\n': "[0]: a: 1\n\n[1]: a: true",
    "[]": "[]",
    "7": "7",
    '{"a": 1, // a comment\n}': '{"a": 1, // a comment\n}',
    "[" * 5000: "[" * 5000,
}


@pytest.mark.parametrize(("text", "read"), RECORDS.items())
def test_json_is_a_line_for_each_value_with_its_path_or_for_a_record(
    parser: ParserProcess, text: str, read: str
) -> None:
    found = parser.parse_bytes("a.json", text.encode())
    assert (found.text.strip(), found.kind) == (read.strip(), "json")


def test_json_that_names_the_same_path_again_and_again_cannot_outgrow_its_limit(parser: ParserProcess) -> None:
    deep = '{"' + "k" * 20_000 + '": ['
    many = deep + ", ".join(["[1]"] * 2000) + "]}"
    assert "10 MiB" in refusal(parser, "a.json", many.encode())[1]
