"""Nothing that stands in a document is lost, wherever it is wrapped; nothing that is deleted or hidden is read."""

from __future__ import annotations

import html
import io
import json
import sys

import pytest
from pypdf import PdfWriter
from pypdf.generic import (
    ArrayObject,
    DictionaryObject,
    IndirectObject,
    NameObject,
    NumberObject,
    PdfObject,
    TextStringObject,
)

from paceline.errors import DocumentError
from paceline.rag.chunk import split, split_document
from paceline.rag.parsing.process import ParserProcess
from paceline.rag.parsing.readers import reader
from tests.rag.parsing.made import archive, book, pdf, shown, workbook

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
STRICT = "http://purl.oclc.org/ooxml/officeDocument/relationships"
WORDS = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SPACES = (
    f'xmlns:w="{WORDS}" xmlns:r="{OFFICE}" xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" '
    'xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart"'
)


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(inner: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{inner}</w:p>"


def package(main: str, parts: dict[str, str], relations: str = OFFICE, below: dict[str, str] | None = None) -> bytes:
    """An office file. parts: by their paths, related to the main one by the names of their files without digits."""
    folder, _, base = main.partition("/")
    related = {f"{folder}/_rels/{base}.rels": [path for path in parts if path != main], "_rels/.rels": [main]}
    written = {path: f'<?xml version="1.0"?>{text}'.encode() for path, text in parts.items()}
    for path, targets in related.items():
        each = "".join(
            f'<Relationship Id="{target}" Target="/{target}" Type="{relations}/'
            + ("officeDocument" if target == main else target.rpartition("/")[2].rstrip("0123456789.xml"))
            + '"/>'
            for target in targets
        )
        written[path] = f"<Relationships>{each}</Relationships>".encode()
    return archive({**written, **{path: text.encode() for path, text in (below or {}).items()}})


def word(body: str, relations: str = OFFICE, **parts: str) -> bytes:
    document = f"<w:document {SPACES}><w:body>{body}</w:body></w:document>"
    more = {f"word/{name}.xml": f"<w:{name} {SPACES}>{text}</w:{name}>" for name, text in parts.items()}
    return package("word/document.xml", {"word/document.xml": document, **more}, relations)


BOX = f"<w:txbxContent>{paragraph(run('boxed'))}</w:txbxContent>"
CELL = "<w:tc>{}</w:tc>"
WRAPPED = {
    "an insertion": (paragraph(run("pays ") + f"<w:ins>{run('950')}</w:ins>"), "pays 950"),
    "a deletion": (paragraph(run("pays ") + "<w:del><w:r><w:delText>400</w:delText></w:r></w:del>"), "pays"),
    "what was moved": (
        paragraph(f"<w:moveFrom>{run('there ')}</w:moveFrom>{run('and ')}<w:moveTo>{run('here')}</w:moveTo>"),
        "and here",
    ),
    "a control in a line": (paragraph(f"<w:sdt><w:sdtContent>{run('filled')}</w:sdtContent></w:sdt>"), "filled"),
    "a control of paragraphs": (f"<w:sdt><w:sdtContent>{paragraph(run('filled'))}</w:sdtContent></w:sdt>", "filled"),
    "controls of rows and cells": (
        f"<w:tbl><w:sdt><w:sdtContent><w:tr>{CELL.format(paragraph(run('a')))}<w:sdt><w:sdtContent>"
        + CELL.format(paragraph(run("b")) + paragraph(run("c")))
        + "</w:sdtContent></w:sdt></w:tr></w:sdtContent></w:sdt></w:tbl>",
        "a | b c",
    ),
    "a field": (paragraph(f"<w:fldSimple>{run('7.3')}</w:fldSimple><w:r><w:instrText>no</w:instrText></w:r>"), "7.3"),
    "a list to choose from": (
        paragraph(
            '<w:r><w:fldChar><w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="no"/>'
            '<w:listEntry w:val="yes"/></w:ddList></w:ffData></w:fldChar></w:r>'
        ),
        "yes",
    ),
    "a smart tag in a link": (
        paragraph(f"<w:hyperlink><w:smartTag>{run('Dunmere')}</w:smartTag></w:hyperlink>"),
        "Dunmere",
    ),
    "custom XML": (f"<w:customXml>{paragraph(run('custom'))}</w:customXml>", "custom"),
    "a text box in two forms": (
        paragraph(
            run("before ")
            + f"<w:r><mc:AlternateContent><mc:Choice>{BOX}</mc:Choice><mc:Fallback>{BOX}</mc:Fallback>"
            + f"</mc:AlternateContent></w:r>{run('after')}"
        ),
        "before after\n\nboxed",
    ),
    "a table in a cell": (
        f"<w:tbl><w:tr>{CELL.format(paragraph(run('a')))}"
        + CELL.format(f"<w:tbl><w:tr>{CELL.format(paragraph(run('b'))) * 2}</w:tr></w:tbl>")
        + "</w:tr></w:tbl>",
        "a\n\nb | b",
    ),
    "signs": (
        paragraph("<w:r><w:t>part</w:t><w:noBreakHyphen/><w:t>A</w:t><w:br/><w:t>so</w:t><w:softHyphen/></w:r>"),
        "part-A\nso",
    ),
    "a formula": (paragraph("<m:oMath><m:r><m:t>x</m:t></m:r><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:oMath>"), "x^2"),
    "hidden runs": (paragraph(run("no", "<w:vanish/>") + run("yes", '<w:vanish w:val="0"/>')), "yes"),
    "runs of a hidden style": (paragraph(run("no", '<w:rStyle w:val="secret"/>') + run("yes")), "yes"),
    "a style with another name": (paragraph(run("Moorings"), '<w:pStyle w:val="own"/>'), "## Moorings"),
    "numbered items": (paragraph(run("one"), '<w:numPr><w:numId w:val="3"/></w:numPr>'), "- one"),
}
STYLES = (
    '<w:style w:styleId="secret"><w:name w:val="Secret"/><w:rPr><w:vanish/></w:rPr></w:style>'
    '<w:style w:styleId="h2"><w:name w:val="heading 2"/></w:style>'
    '<w:style w:styleId="own"><w:name w:val="Own"/><w:basedOn w:val="h2"/></w:style>'
)


@pytest.mark.parametrize("what", WRAPPED)
def test_what_stands_in_a_word_document_is_read_wherever_it_is_wrapped(parser: ParserProcess, what: str) -> None:
    body, wanted = WRAPPED[what]
    for relations in (OFFICE, STRICT) if "style" in what else (OFFICE,):  # by which styles are found
        made = word(body + paragraph(run("end")), relations, styles=STYLES)
        assert parser.parse_bytes("a.docx", made).text.removesuffix("end").strip() == wanted


MHTML = (
    b"MIME-Version: 1.0\nContent-Type: multipart/related; type=text/html; boundary=B\n\n--B\nContent-Type: text/html; "
    b"charset=utf-8\nContent-Transfer-Encoding: quoted-printable\n\n<h1>Fees</h1>caf=C3=A9<p hidden>no</p>\n--B--\n"
)


@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        ("part.html", b"<h1>Fees</h1><p>caf\xc3\xa9</p>", "# Fees\n\ncaf\u00e9"),
        ("part.mht", MHTML, "# Fees\n\ncaf\u00e9"),
        ("part.mht", MHTML.replace(b"utf-8", b"koi8-r").replace(b"caf=C3=A9", b"=D2=C5=DA"), "# Fees\n\nрез"),
        ("part.docx", word(paragraph(run("inner")) + paragraph(run("text"))), "inner\n\ntext"),
        ("part.txt", b"one\ntwo", "one\ntwo"),
        ("part.rtf", b"", "(part.rtf is empty; write something in it or leave it out)"),
    ],
)
def test_a_document_within_a_word_document_is_read_in_its_place(
    parser: ParserProcess, name: str, data: bytes, wanted: str
) -> None:
    document = f"<w:document {SPACES}><w:body>{paragraph(run('before'))}<w:altChunk r:id='c'/>{paragraph(run('after'))}"
    related = f'<Relationships><Relationship Id="c" Target="{name}" Type="{OFFICE}/aFChunk"/></Relationships>'
    made = archive(
        {
            "_rels/.rels": b"<Relationships/>",
            "word/document.xml": f"{document}</w:body></w:document>".encode(),
            "word/_rels/document.xml.rels": related.encode(),
            f"word/{name}": data,
        }
    )
    assert parser.parse_bytes("a.docx", made).text == f"before\n\n{wanted}\n\nafter"


def test_notes_comments_headers_and_footers_of_word_are_read_once(parser: ParserProcess) -> None:
    cited = "".join(f'<w:r><w:{kind}Reference w:id="2"/></w:r>' for kind in ("footnote", "endnote", "comment"))
    made = word(
        paragraph(run("text") + cited) + paragraph(run("more")),
        footnotes=f'<w:footnote w:type="separator"/><w:footnote w:id="2">{paragraph(run("foot"))}</w:footnote>',
        endnotes=f'<w:endnote w:id="2">{paragraph(run("end"))}</w:endnote>',
        comments=f'<w:comment w:id="2">{paragraph(run("remark"))}</w:comment>',
        header=paragraph(run("Harbour office")),
        footer=paragraph(run("3")),
    )
    assert parser.parse_bytes("a.docx", made).text == (
        "Harbour office\n\ntext\n\nNote: foot\n\nNote: end\n\nComment: remark\n\nmore"
    )


def test_charts_of_slides_are_read_and_hidden_shapes_are_not(parser: ParserProcess) -> None:
    def shape(text: str, more: str = "", place: str = "") -> str:
        inner = f"<p:nvSpPr><p:cNvPr {more}/><p:nvPr>{place}</p:nvPr></p:nvSpPr>"
        lines = "".join(f"<a:p><a:r><a:t>{line}</a:t></a:r></a:p>" for line in text.split("\n"))
        return f"<p:sp>{inner}<p:txBody>{lines}</p:txBody></p:sp>"

    chart = "<p:graphicFrame><c:chart r:id='ppt/slides/chart.xml'/></p:graphicFrame>"
    tree = shape("one\ntwo") + chart + shape("hidden", 'hidden="1"') + shape("7", place='<p:ph type="sldNum"/>')
    tree += shape("Fees", place='<p:ph type="title"/>')
    listed = '<p:sldIdLst><p:sldId id="256" r:id="ppt/slides/slide.xml"/></p:sldIdLst>'
    parts = {
        "ppt/presentation.xml": f"<p:presentation {SPACES}>{listed}</p:presentation>",
        "ppt/slides/slide.xml": f"<p:sld {SPACES}><p:spTree>{tree}</p:spTree></p:sld>",
    }
    made = package(
        "ppt/presentation.xml",
        parts,
        below={
            "ppt/slides/_rels/slide.xml.rels": '<Relationships><Relationship Id="ppt/slides/chart.xml" '
            f'Type="{OFFICE}/chart" Target="chart.xml"/></Relationships>',
            "ppt/slides/chart.xml": f"<c:chartSpace {SPACES}><c:ser><c:cat><c:pt><c:v>Spring</c:v></c:pt></c:cat>"
            "<c:val><c:pt><c:v>4.5</c:v></c:pt></c:val></c:ser></c:chartSpace>",
        },
    )
    assert parser.parse_bytes("a.pptx", made).text == "# Fees\n\none\ntwo\n\nSpring\n4.5"


# ---- HTML and books -------------------------------------------------------------------------------------------------
HIDDEN = {
    '<p hidden>no<p hidden="until-found">yes': "yes",
    '<i aria-hidden="true">no</i>yes': "yes",
    "<p style='color: red; DISPLAY : none !important'>no</p>yes": "yes",
    "<p style='visibility:hidden'>no</p>yes": "yes",
    "<p style='font-size:0px'>no</p><p style='opacity: 0.0'>no</p><p style='font-size:0.5em;opacity:.01'>yes": "yes",
    "<style>/* .b{} */ .a, p.b { display:none }</style><p class='x a'>no<p class=b>no<div class=b>yes</div>": "yes",
    "<style>@media print { .a { display:none } .c {} } .d{display:none} .d{display:block}</style>"
    "<p class='a d'>yes": "yes",
    "<dialog>no</dialog><template>no</template><details><summary>yes</summary>yes</details>": "yes\n\nyes",
    "<button>yes</button> <math><mi>x</mi><annotation>no</annotation></math>": "yes x",
    "<svg><title>no</title><text>yes</text></svg>": "yes",
}


@pytest.mark.parametrize("html", HIDDEN)
def test_what_a_page_hides_is_not_read_and_what_it_shows_is(parser: ParserProcess, html: str) -> None:
    assert parser.parse_bytes("a.html", f"<html><body>{html}</body></html>".encode()).text == HIDDEN[html]
    made = book({"a.xhtml": f"<html><body>{html}</body></html>".encode()}, ["a.xhtml"])
    assert parser.parse_bytes("a.epub", made).text == HIDDEN[html]


NAMED = "Room | Beds | View\nRoom: Heather; Beds: 2\nRoom: Rowan; Beds: 1; View: yard"
BARE = "Room | Beds | View\nHeather | 2 |\nRowan | 1 | yard"


def html_table(text: str) -> str:
    rows = (
        "".join(f"<td>{cell.strip(' |')}" for cell in row.replace("2 |", "2 | ").split(" | "))
        for row in text.split("\n")
    )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def piped(text: str) -> str:
    head, *rows = (f"| {row} |" for row in text.split("\n"))
    return "\n".join([head, "|---|:-:|---|", *rows])


def test_a_row_of_a_table_has_the_names_of_its_columns_where_they_are_known(parser: ParserProcess) -> None:
    page = f"<p>Before.</p>{html_table(BARE)}<p>After.</p>"
    assert parser.parse_bytes("a.html", page.encode()).text == f"Before.\n\n{NAMED}\n\nAfter."
    text = f"Before.\n\n{piped(BARE)}\n\nAfter.\n"
    assert parser.parse_bytes("a.md", text.encode()).text == f"Before.\n\n{NAMED}\n\nAfter.\n"
    spanning = page.replace("<td>Rowan<td>1", "<td colspan=2>Rowan")
    for name, kept in [
        ("a.txt", text),
        ("a.md", f"```\n{text}```\n"),
        ("a.md", "a | b\n--- | ---\n1 | 2\n"),
        ("a.md", "a | b\n--- | ---\n1 | 2 | 3\n4 | 5\n"),
        ("a.md", "1 | 2\n--- | ---\n1 | 2\n4 | 5"),
    ]:
        assert parser.parse_bytes(name, kept.encode()).text == kept
    assert parser.parse_bytes("a.html", spanning.encode()).text.endswith("Room: Rowan; View: yard\n\nAfter.")
    nested = f"<table><tr><td>{html_table(BARE)}</td></tr><tr><td>x</td></tr><tr><td>y</td></tr></table>"
    assert parser.parse_bytes("a.html", nested.encode()).text == f"{NAMED}\n\nx\ny"


def test_a_table_of_names_and_values_is_read_as_a_form(parser: ParserProcess) -> None:
    form = "<table><tr><th>Boat<td>Petrel<tr><th>Hull number:<td>HN-7<tr><th>Built<td>1988</table>"
    assert parser.parse_bytes("a.html", form.encode()).text == "Boat: Petrel\nHull number: HN-7\nBuilt: 1988"
    fees = "<table><tr><td>Berth<td>Fee<tr><td>North<td>12<tr><td>South<td>15</table>"
    assert "Berth: North; Fee: 12" in parser.parse_bytes("a.html", fees.encode()).text


def test_a_term_of_html_stands_before_what_explains_it(parser: ParserProcess) -> None:
    terms = "<dl><dt>\n Berth:\n</dt>\n<dd><p>7</p></dd><dt>Depth</dt><dd>2 m</dd><dd>1 m at ebb</dd></dl><p>End.</p>"
    assert parser.parse_bytes("a.html", terms.encode()).text == "Berth: 7\n\nDepth: 2 m\n1 m at ebb\n\nEnd."
    row = "<table><tr><td><dl><dt>a</dt><dd>b</dd></dl></td><td>c</td></tr></table>"
    assert parser.parse_bytes("a.html", row.encode()).text == "a b | c"


def test_cells_of_html_that_hold_paragraphs_stay_in_their_row(parser: ParserProcess) -> None:
    table = "<table><tr><td><p>a</p><td><p>b</p><ul><li>c</ul></tr><tr><td> <td></tr><tr><td>d<td>e</table>"
    assert parser.parse_bytes("a.html", table.encode()).text == "a | b c\nd | e"
    items = "<ul><li><p>a</p></li><li><p>b</p></li></ul>"
    assert parser.parse_bytes("a.html", items.encode()).text == "- a\n\n- b"


def test_a_book_is_read_with_the_notes_that_no_order_names(parser: ParserProcess) -> None:
    made = book({"a.xhtml": b"<p>text", "notes.xhtml": b"<p>a note"}, ["a.xhtml"])
    assert parser.parse_bytes("a.epub", made).text == "text\n\na note"


# ---- PDF ------------------------------------------------------------------------------------------------------------
def test_a_word_broken_at_a_lines_end_is_whole_where_that_is_certain(parser: ParserProcess) -> None:
    lines = ("the main-", "tenance is cost-", "effective, and the effective", "rate of well-", "known and well-known")
    read = parser.parse_bytes("a.pdf", pdf([shown(*lines)])).text
    assert read == "the maintenance is cost-\neffective, and the effective\nrate of well-known and well-known"


def test_letters_that_are_drawn_singly_are_words(parser: ParserProcess) -> None:
    def drawn(text: str, step: float) -> bytes:
        letters = ((72 + step * at, letter) for at, letter in enumerate(text) if letter != " ")
        return b" ".join(b"1 0 0 1 %f 700 Tm (%s) Tj" % (x, letter.encode()) for x, letter in letters)

    for step in (7, 8):
        page = b"BT /F1 12 Tf " + drawn("Wilful fisher", step) + b" ET"
        assert parser.parse_bytes("a.pdf", pdf([page])).text == "Wilful fisher"
    columns = b"BT /F1 12 Tf " + drawn("12345678", 20) + b" ET"
    assert parser.parse_bytes("a.pdf", pdf([columns])).text == "1 2 3 4 5 6 7 8"
    kept = b"BT /F1 12 Tf 72 700 Td (it) Tj 11 0 Td (is) Tj 12 0 Td (a) Tj 10 0 Td (b) Tj ET"
    assert parser.parse_bytes("a.pdf", pdf([kept])).text == "it is a b"


def test_what_fields_of_a_form_hold_is_read(parser: ParserProcess) -> None:
    writer = PdfWriter(clone_from=io.BytesIO(pdf([shown("An application")])))

    def field(name: str, kind: str, value: PdfObject, **more: PdfObject) -> IndirectObject:
        entries = {"/Type": NameObject("/Annot"), "/Subtype": NameObject("/Widget"), "/FT": NameObject(kind),
                   "/T": TextStringObject(name), "/V": value,
                   "/Rect": ArrayObject(map(NumberObject, (0, 0, 90, 20)))}  # fmt: skip
        more = {f"/{key}": each for key, each in more.items()}
        return writer._add_object(
            DictionaryObject({NameObject(key): each for key, each in {**entries, **more}.items()})
        )

    fields = ArrayObject(
        [
            field("Applicant", "/Tx", TextStringObject("Gwen Finch")),
            field("Empty", "/Tx", TextStringObject("")),
            field("Hidden", "/Tx", TextStringObject("no"), F=NumberObject(2)),
        ]
    )
    writer.pages[0][NameObject("/Annots")] = fields
    writer.root_object[NameObject("/AcroForm")] = DictionaryObject({NameObject("/Fields"): fields})
    with io.BytesIO() as out:
        writer.write(out)
        made = out.getvalue()
    assert parser.parse_bytes("a.pdf", made).text == "An application\nApplicant: Gwen Finch"


# ---- tables and records ---------------------------------------------------------------------------------------------
TABLES = {
    "1;2,50;3\n4;5,75;6": "1 | 2,50 | 3\n4 | 5,75 | 6",
    "sep=;\nName;Fee\nAnn;1,50": "Name: Ann; Fee: 1,50",
    "Name;Fee;\nAnn;2;\n": "Name: Ann; Fee: 2",
    "Name,Tel,Tel\nAnn,1,2": "Name: Ann; Tel: 1; Tel 2: 2",
    ",Name,Fee\n0,Ann,7": "0; Name: Ann; Fee: 7",
    "Name,2019,2020\nAnn,7,8\n": "Name: Ann; 2019: 7; 2020: 8",
    "Ann,1999,7\nBob,2001,8": "Ann | 1999 | 7\nBob | 2001 | 8",
    "Fees of the harbour,,\n,,\nBoat,Fee,Paid\nLark,7,yes": "Fees of the harbour\nBoat: Lark; Fee: 7; Paid: yes",
    "Name,Fee\nAnn,7,late": "Name: Ann; Fee: 7; late",
    f"Name,{'long ' * 30}end\nAnn,7": f"Name | {'long ' * 30}end\nName: Ann; {('long ' * 30)[:80].strip()}…: 7",
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_whose_header_is_odd_keeps_its_names(parser: ParserProcess, table: str) -> None:
    read = parser.parse_bytes("a.csv", table.encode()).text
    assert "\n".join(line for line in read.split("\n") if line) == TABLES[table]


def test_a_cell_over_several_columns_moves_no_other_under_their_names(parser: ParserProcess) -> None:
    rows = [["Name", "Phone", "City"], ["Ann", "555", "666", "Oslo"], ["Bob", "7", "8", "Bergen"]]
    cells = ["".join(CELL.format(paragraph(run(cell))) for cell in row) for row in rows]
    first = CELL.format(paragraph(run("Phone")))
    wide = first.replace("<w:tc>", '<w:tc><w:tcPr><w:gridSpan w:val="2"/></w:tcPr>')
    table = "".join(f"<w:tr>{row}</w:tr>" for row in cells).replace(first, wide)
    assert (
        "Name: Ann; Phone: 555; 666; City: Oslo" in parser.parse_bytes("a.docx", word(f"<w:tbl>{table}</w:tbl>")).text
    )
    page = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}" for row in rows).replace(
        "<td>Ph", "<td colspan=2>Ph"
    )
    assert "Name: Ann; Phone: 555; 666; City: Oslo" in parser.parse_bytes("a.html", f"<table>{page}".encode()).text


def test_rows_of_an_rtf_table_have_the_names_of_its_columns(parser: ParserProcess) -> None:
    rows = "".join(rf"\trowd\intbl {a}\cell {b}\cell\row" for a, b in (("Room", "Beds"), ("Oak", 2), ("Elm", 3)))
    read = parser.parse_bytes("a.rtf", (r"{\rtf1 " + rows + r"\pard after\par}").encode())
    assert read.text == "Room | Beds\nRoom: Oak; Beds: 2\nRoom: Elm; Beds: 3\n\nafter"


def test_names_of_columns_are_whole_above_rows_where_they_are_cut(parser: ParserProcess) -> None:
    asked = [f"How well did you like {'the weather of the harbour ' * 4}in {month}?" for month in ("May", "July")]
    rows = [["Ann", "5", "1"], ["Bob", "2", "3"]]
    html = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in [["Name", *asked], *rows])
    lines = [f"| {' | '.join(row)} |" for row in [["Name", *asked], ["---"] * 3, *rows]]
    for name, table in (("a.html", f"<table>{html}</table>"), ("a.md", "\n".join(lines))):
        read = parser.parse_bytes(name, table.encode()).text
        assert " ".join(asked[0].split()) in read and " ".join(asked[1].split()) in read, read


def test_a_key_of_json_that_comes_twice_keeps_both_values(parser: ParserProcess) -> None:
    read = parser.parse_bytes("a.json", b'{"tel": 1, "tel": {"a": 2, "a": 3}}').text
    assert read == "tel: 1\ntel.a: 2\ntel.a: 3"


# ---- the kinds besides ----------------------------------------------------------------------------------------------
def test_a_spreadsheet_is_read_by_its_visible_sheets_and_its_rows_are_placed(parser: ParserProcess) -> None:
    cells = {"A1": "Name", "B1": "Fee", "A2": "Ann", "B2": "7", "B4": "9"}
    read = parser.parse_bytes("a.xlsx", workbook(cells, {"Secret": {"A1": "no"}}))
    assert (read.kind, read.text) == ("xlsx", "# Fees\nName | Fee\nName: Ann; Fee: 7\n\nFee: 9")
    odd = workbook({"A1": "4916123456789012", "A2": "1000000000000000", "A3": "# 5 lamp"})
    assert parser.parse_bytes("a.xlsx", odd).text == "# Fees\n4916123456789012\n1000000000000000\n # 5 lamp"
    chunks = list(split(read.text, len, kind=read.kind, chunk_tokens=20, overlap=0))
    assert [chunk.place for chunk in chunks][-1] == "Fees, row 4"
    assert "Fees, rows 1\u20132" in [chunk.place for chunk in split(read.text[:37], len, kind=read.kind)]


def test_an_open_document_is_read_with_its_notes_and_without_what_is_deleted_or_hidden(parser: ParserProcess) -> None:
    names = {"office": "office", "text": "text", "table": "table", "style": "style"}
    spaces = " ".join(f'xmlns:{each}="urn:oasis:names:tc:opendocument:xmlns:{each}:1.0"' for each in names)
    body = (
        "<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>"
        '<text:h text:outline-level="2">Moorings</text:h><text:p>One <text:span>two</text:span><text:note>'
        "<text:note-citation>1</text:note-citation><text:note-body><text:p>a note</text:p></text:note-body></text:note>"
        ' three.<text:span text:style-name="T1">hidden</text:span></text:p>'
        "<text:list><text:list-item><text:p>item</text:p></text:list-item></text:list>"
        "<table:table><table:table-row><table:table-cell><text:p>a</text:p></table:table-cell><table:table-cell>"
        "<text:p>b</text:p></table:table-cell></table:table-row>"
        '<table:table-row table:visibility="collapse"><table:table-cell><text:p>hidden</text:p></table:table-cell>'
        '</table:table-row><table:table-row><table:table-cell table:number-columns-repeated="2"><text:p>c</text:p>'
        '</table:table-cell><table:table-cell table:number-columns-repeated="16000"/></table:table-row></table:table>'
    )
    hidden = '<style:style style:name="T1"><style:text-properties text:display="none"/></style:style>'
    content = (
        f"<office:document-content {spaces}><office:automatic-styles>{hidden}</office:automatic-styles>"
        f"<office:body><office:text>{body}</office:text></office:body></office:document-content>"
    )
    made = archive({"mimetype": b"application/vnd.oasis.opendocument.text", "content.xml": content.encode()})
    read = parser.parse_bytes("a.odt", made)
    assert (read.kind, read.text) == (
        "odt", "## Moorings\n\nOne two three.\n\nNote: a note\n\n- item\n\na | b\nc | c"
    )  # fmt: skip


def test_rtf_is_read_with_its_notes_and_tables_and_without_what_is_hidden(parser: ParserProcess) -> None:
    text = (
        r"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}{\f1\fcharset204 Arial;}}{\info{\title Rules}}"
        r"{\pard\outlinelevel0 Moorings\par}\pard Caf\'e9 \u8364?5{\v hidden}{\*\unknown no}{\footnote a note}\par "
        r"\trowd\intbl a\cell b\cell\row\pard {\f1 \'cc\'f3}\u-10179?\u-8704?\par}"
    )
    read = parser.parse_bytes("a.rtf", text.encode("ascii"))
    assert (read.kind, read.title) == ("rtf", "Rules")
    assert read.text == "# Moorings\n\nCafé €5\n\nNote: a note\n\na | b\n\nМу😀"


def test_a_message_is_read_with_what_is_attached(parser: ParserProcess) -> None:
    message = (
        b"From: Ann <a@example.org>\nSubject: =?utf-8?q?F=C3=A9es?=\nContent-Type: multipart/mixed; boundary=b\n\n"
        b"--b\nContent-Type: multipart/alternative; boundary=c\n\n--c\nContent-Type: text/plain; charset=latin-1\n"
        b"Content-Transfer-Encoding: quoted-printable\n\nCaf=E9, 7\n--c\nContent-Type: text/html\n\n<p>Same\n--c--\n"
        b"--b\nContent-Disposition: attachment; filename=a.csv\nContent-Type: text/csv\n\nName,Fee\nBob,9\n"
        b"--b\nContent-Disposition: attachment; filename=a.png\nContent-Type: image/png\n\n\x89PNG\n"
        b"--b\nContent-Type: message/rfc822\n\nSubject: Inner\n\nforwarded\n--b--\n"
    )
    read = parser.parse_bytes("a.eml", message)
    assert (read.kind, read.title) == ("eml", "Fées")
    assert read.text.startswith(
        "# Fées\n\nFrom: Ann <a@example.org>\n\nCafé, 7\n\nAttachment: a.csv\n\nName: Bob; Fee: 9"
    )
    assert "Attachment: a.png (is an image" in read.text and read.text.endswith("# Inner\n\nforwarded")
    assert "Same" not in read.text


def test_a_mailbox_is_read_message_by_message(parser: ParserProcess) -> None:
    message = (
        b"From a@x Mon Apr 13 08:31:00 2026\nFrom: Ann <a@x>\nSubject: %s\n\n>From here on, %s.\n\n"
        b"From Bergen:\nnote: %s\n"
    )
    read = parser.parse_bytes("in.mbox", message % (b"Boots", b"one", b"a") + message % (b"Shark", b"two", b"b"))
    assert (read.kind, read.title) == ("eml", "in.mbox")
    texts = [
        f"# {subject}\n\nFrom: Ann <a@x>\n\nFrom here on, {number}.\n\nFrom Bergen:\nnote: {note}"
        for subject, number, note in (("Boots", "one", "a"), ("Shark", "two", "b"))
    ]
    assert read.text == "\n\n".join(texts)


@pytest.mark.parametrize(
    "header", ['From: "', "From: <", "To: ida@", "From: a@[1", "To: g::;*", "From: " + "(" * 50_000]
)
def test_a_header_that_breaks_the_rules_keeps_no_message_from_being_read(parser: ParserProcess, header: str) -> None:
    read = parser.parse_bytes("a.eml", f"{header}\nSubject: Boots\n\nThey are red.\n".encode())
    assert read.title == "Boots" and read.text.endswith("They are red.")


CALENDAR = """BEGIN:VCALENDAR
X-WR-CALNAME:Home
BEGIN:VEVENT
UID:1
DTSTART;TZID="Europe/Oslo:x":20260613T073000
RRULE:FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,1TH;UNTIL=20270101
EXDATE:20260627T073000
summary:Ferry\\, early; pack
DESCRIPTION:Cabin\\n61
 17
ORGANIZER;CN="Moe; Ida":mailto:i@x
ATTENDEE;PARTSTAT=DECLINED:mailto:o@x
BEGIN:VALARM
DESCRIPTION:Reminder
END:VALARM
END:VEVENT
BEGIN:VEVENT
SUMMARY:Fair
DTSTART;VALUE=DATE:20260724
DTEND;VALUE=DATE:20260726
END:VEVENT
BEGIN:VEVENT
SUMMARY:Day off
DTSTART;VALUE=DATE:20260724
DTEND;VALUE=DATE:20260725
DURATION:PT1H30M
END:VEVENT
BEGIN:VTODO
SUMMARY:Paint
DUE;VALUE=DATE:20261345
COMPLETED:20260613T073000Z
END:VTODO
END:VCALENDAR
"""
CARDS = """BEGIN:VCARD
TEL;TYPE=work,voice:+47 55
item1.ADR:;;Quay 3;Florø;;;Norway
item1.X-ABLabel:_$!<Summer>!$_
N:Moe;Ida;;;
BDAY:1604-02-29
PHOTO:AAAA
END:VCARD
BEGIN:VCARD
VERSION:2.1
FN;CHARSET=UTF-8;ENCODING=QUOTED-PRINTABLE:J=C3=B6rg=
 Lie
TEL;HOME;FAX:tel:7
END:VCARD
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_calendar_and_contacts_are_a_line_for_each_entry(parser: ParserProcess, end: str) -> None:
    read = parser.parse_bytes("home.ics", CALENDAR.replace("\n", end).encode())
    assert (read.kind, read.title) == ("ics", "Home")
    assert read.text.split("\n") == [
        "Event: Ferry, early, pack; Start: Saturday 13 June 2026, 07:30; "
        "Repeats: weekly every 2 on Monday, 1Thursday until Friday 1 January 2027; "
        "Not on: Saturday 27 June 2026, 07:30; "
        "Description: Cabin 6117; Organizer: Moe, Ida; Attendee: o@x (declined)",
        "Event: Fair; Start: Friday 24 July 2026; End: Saturday 25 July 2026",
        "Event: Day off; Start: Friday 24 July 2026; Duration: 1 h 30 min",
        "Event: Paint; Due: 20261345; Completed: Saturday 13 June 2026, 07:30 UTC",
    ]
    chunks = list(split(read.text, lambda text: len(text.split()), kind=read.kind, chunk_tokens=80, overlap=8))
    assert [chunk.place for chunk in chunks] == [f"entry {number}" for number in (1, 2, 3, 4)]
    read = parser.parse_bytes("all.vcf", CARDS.replace("\n", end).encode())
    assert (read.title, read.text.split("\n")) == (
        "all.vcf",
        [
            "Name: Ida Moe; Phone (work): +47 55; Address (Summer): Quay 3, Florø, Norway; Birthday: 29 February",
            "Name: Jörg Lie; Phone (home, fax): 7",
        ],
    )


def test_of_a_calendar_a_fold_divides_characters_and_pictures_do_not_count(parser: ParserProcess) -> None:
    picture = b"PHOTO;ENCODING=b:" + b"\r\n ".join([b"A" * 74] * 200_000) + b"\r\n"
    card = b"BEGIN:VCARD\r\nFN:F\xc3\r\n \xa4hre\r\n" + picture + b"END:VCARD\r\n"
    assert parser.parse_bytes("a.vcf", card).text == "Name: Fähre"
    assert refused(parser, "a.vcf", b"Ida, +47 55") == "is no calendar and no list of contacts; export it again"


def test_subtitles_are_what_is_said(parser: ParserProcess) -> None:
    film = (
        "1\r\n00:00:01,000 --> 00:00:04,000\r\nMy name is <i>Ida</i>,\r\nand I fish.\r\n2\r\n"
        "00:00:05,000 --> 00:00:06,000\r\n\r\n\r\n3\r\n00:00:07,000-->00:00:08,000\r\n\r\n{\\an8}5 < 6 and 7 > 3"
    )
    read = parser.parse_bytes("film.srt", film.encode())
    assert (read.kind, read.title, read.text) == ("srt", "film.srt", "My name is Ida, and I fish.\n5 < 6 and 7 > 3")
    talk = (
        "WEBVTT\n\nNOTE hidden\n\nintro\n00:01.000 --> 00:04.000 align:start\n<v.loud Ida Moe>A shark &amp; I?\n\n"
        "NOTE this too\n\nnext\n00:05.000 --> 00:06.000\n- Yes.\n00:06.000 --> 00:07.000\n- Yes.\n- No."
    )
    assert parser.parse_bytes("talk.vtt", talk.encode()).text == "Ida Moe: A shark & I?\n- Yes.\n- No."
    assert refused(parser, "a.srt", b"no times").startswith("has no subtitles with times")
    assert len(parser.parse_bytes("a.srt", b"00:01,0 --> 00:02,0\n" + b"<" * 1_000_000).text) == 1_000_000


XML = """
<?xml version="1.0" encoding="iso-8859-1"?><!-- of May -->
<s:loans xmlns:s="urn:x" by="Ida" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:schemaLocation="urn:x y">
<loan card="17"><title>Café</title><due>3 May</due><none/></loan><loan card="18"><title lang="en">Knots</title></loan>
<note>Of <b>two</b> kinds</note><about><![CDATA[<p>One</p><ul><li>two</li></ul>]]></about><map>%s</map>
<dict><key>Boat</key><string>red</string><key>Seats</key><integer>3</integer><key>Sold</key><false/></dict><q>a</q><r>b</r><q>c</q></s:loans>
"""


def test_xml_of_data_is_read_as_named_values_and_other_xml_as_it_is(parser: ParserProcess) -> None:
    read = parser.parse_bytes("loans.xml", (XML % ("A" * 300)).encode("latin-1"))
    assert (read.kind, read.title) == ("xml", "loans.xml")
    assert read.text == (
        "by: Ida\n\nloan[0]: card: 17; title: Café; due: 3 May\n\nloan[1]: card: 18; title.lang: en; "
        "title.text: Knots\n\n"
        "note: Of two kinds\nabout: One - two\ndict.Boat: red\ndict.Seats: 3\ndict.Sold: false\nq: a\nr: b\nq: c"
    )
    for kept in (
        "<p>One <b>two</b> three</p>",
        "<p>One<b>two</b></p>",
        "<p>broken",
        '<!DOCTYPE p [<!ENTITY e "x">]><p><q>&e;</q></p>',
        f"{'<p>' * 10_000}x{'</p>' * 10_000}",
    ):
        assert parser.parse_bytes("a.xml", kept.encode()).text == kept
    greek = '<?xml version="1.0" encoding="iso-8859-7"?><p>Το <b>δωμάτιο</b></p>'
    assert parser.parse_bytes("a.xml", greek.encode("iso-8859-7")).text == greek


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("copy <source> <target>", "copy <source> <target>"), ("List<string>", "List<string>"),
        ("if a <b and c> d", "if a <b and c> d"), ("<b>Cold</b> and <i>wet</i>", "Cold and wet"), ("a<br/>b", "a b"),
    ],
)  # fmt: skip
def test_a_text_of_xml_is_html_where_it_has_such_elements_alone(parser: ParserProcess, text: str, read: str) -> None:
    data = f"<r><a>1</a><b>{html.escape(text)}</b></r>".encode()
    assert parser.parse_bytes("a.xml", data).text == f"a: 1\nb: {read}"


def test_a_raised_number_is_told_from_what_stands_before_it(parser: ParserProcess) -> None:
    page = "<p>The rent is 640<sup>1</sup> EUR for 58 m<sup>2</sup>, on the 1<sup>st</sup>.</p>"
    assert parser.parse_bytes("a.html", page.encode()).text == "The rent is 640^1 EUR for 58 m^2, on the 1st."
    made = word(paragraph(run("640") + run("1", '<w:vertAlign w:val="superscript"/>') + run(" EUR")))
    assert parser.parse_bytes("a.docx", made).text == "640^1 EUR"


def test_without_its_library_xml_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paceline.rag.parsing.readers.markup", None)
    assert reader("xml")(b"<r><a>1</a></r>", "a.xml").text == "<r><a>1</a></r>"


OUTLINE = """# -*- mode: org -*-
#+AUTHOR: Ida
#+title: Bergen
* Booked
:PROPERTIES:
:ID: 8
:END:
** TODO Ferry
   *bold* 612
# a remark
#+begin_src sh
* no heading
#+end_src
| Box | In |
|-----+----|
| A   | 3  |
"""


def test_the_headings_of_an_outline_and_of_slides_are_headings(parser: ParserProcess) -> None:
    read = parser.parse_bytes("trip.org", OUTLINE.encode())
    assert (read.title, read.text) == (
        "Bergen",
        "# Bergen\n\nAUTHOR: Ida\n## Booked\n### TODO Ferry\n   *bold* 612\na remark\n```\n* no heading\n```\n"
        "| Box | In |\n|-----|----|\n| A   | 3  |\n",
    )
    slide = (
        '<o:document xmlns:o="urn:oasis:names:tc:opendocument:xmlns:office:1.0" xmlns:d="urn:d" xmlns:t="urn:t" '
        'xmlns:p="urn:p">'
        "<o:body><o:presentation><p:footer-decl>Hidden</p:footer-decl><d:page>"
        '<d:frame p:class="title"><d:text-box><t:p>The sea</t:p></d:text-box></d:frame>'
        "<d:frame><d:text-box><t:list><t:list-item><t:p>is deep</t:p></t:list-item></t:list></d:text-box></d:frame>"
        "</d:page></o:presentation></o:body></o:document>"
    )
    kind = b"application/vnd.oasis.opendocument.presentation"
    read = parser.parse_bytes("sea.odp", archive({"mimetype": kind, "content.xml": slide.encode()}))
    assert (read.kind, read.text) == ("odt", "# The sea\n\n- is deep")


def test_what_other_programs_leave_out_or_write_twice_is_read(parser: ParserProcess) -> None:
    both = b"Subject: S\nContent-Type: multipart/alternative; boundary=b\n\n--b\nContent-Type: text/plain\n\n \n"
    mail = parser.parse_bytes("a.eml", both + b"--b\nContent-Type: text/html\n\n<p>40</p>\n--b--")
    assert mail.text == "# S\n\n40"
    box = parser.parse_bytes("a.mbox", b"From \r\nSubject: One\r\n\r\na\r\n\r\nFrom \r\nSubject: Two\r\n\r\nb")
    assert box.text == "# One\n\na\n\n# Two\n\nb"
    cards = b"BEGIN:VCARD\nFN:Ida\nTEL:7\nBEGIN:VCARD\nFN:\nN:Moe, Jr.;Ola\nTEL:8"
    assert parser.parse_bytes("a.vcf", cards).text == "Name: Ida; Phone: 7\nName: Ola Moe, Jr.; Phone: 8"
    day = b"BEGIN:VCALENDAR\nBEGIN:VEVENT\nDTSTART;VALUE=DATE:20260724\nDTEND;VALUE=DATE:20260724\nEND:VEVENT"
    assert parser.parse_bytes("a.ics", day).text == "Start: Friday 24 July 2026"
    feed = f"<r><a>{'港' * 201}</a><b><![CDATA[<meta charset=latin-1><p>Café</p>]]></b></r>"
    assert parser.parse_bytes("a.xml", feed.encode()).text == f"a: {'港' * 201}\nb: Café"
    assert parser.parse_bytes("a.org", b"* One\n:note:\ntext\n* Two").text == "## One\ntext\n## Two"


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("a.html", "<h2>Menu</h2><p>fish and five chips", "Menu"),
        ("a.html", "<h2>Monday</h2>fish<h2>Tuesday</h2>meat and five chips", ""),
        ("a.html", "<h2>Monday</h2>fish<h3>Soup</h3>hot and salty soup", "Monday"),
        ("a.html", "<table><tr><th>#<th>Boat<tr><td>1<td>Lark<tr><td>2<td>Tern</table>", ""),
        ("a.csv", "# a,b\n1,2\n3,4\n", "a.csv"),
    ],
)
def test_a_document_that_names_no_title_has_that_of_its_one_heading(
    parser: ParserProcess, name: str, text: str, title: str
) -> None:
    read = parser.parse_bytes(name, text.encode())
    last = list(split_document(read, lambda part: len(part.split()), chunk_tokens=3, overlap=0))[-1]
    assert last.title == title


def refused(parser: ParserProcess, name: str, data: bytes) -> str:
    with pytest.raises(DocumentError) as caught:
        parser.parse_bytes(name, data)
    return str(caught.value).removeprefix(f"{name} ").removesuffix(".")


def test_a_notebook_is_its_cells_and_what_they_printed(parser: ParserProcess) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Fees\n", "of boats"]},
        {"cell_type": "code", "source": "# no heading\n1 + 1", "outputs": [{"data": {"text/plain": ["2"]}}]},
        {"cell_type": "code", "source": "x", "outputs": [{"output_type": "error", "ename": "Key", "evalue": "x"}]},
    ]
    read = parser.parse_bytes("a.ipynb", json.dumps({"cells": cells}).encode())
    assert (read.kind, read.title) == ("ipynb", "Fees")
    assert read.text == (
        "# Fees\nof boats\n\n```\n# no heading\n1 + 1\n```\n\n```\n2\n```\n\n```\nx\n```\n\n```\nKey: x\n```"
    )
