"""DOCX by python-docx: paragraphs, headings, lists and tables in order.

Not handled: headers and footers, notes, comments, text boxes, tables within tables.
"""

from __future__ import annotations

import io

import docx
from docx.table import Table, _Cell
from docx.text.paragraph import Paragraph

from paceline.rag.parsing.readers.archive import open_archive
from paceline.rag.parsing.readers.content import Content, TextBuilder, UnreadableError, one_line


def read(data: bytes, name: str) -> Content:
    del name
    open_archive(data)  # it is judged before python-docx unpacks it
    document = docx.Document(io.BytesIO(data))
    out = TextBuilder()
    title = one_line(document.core_properties.title or "")
    styles: dict[str | None, str] = {}  # names by id, since finding one takes a search of all styles
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            _write_table(block, out)
            continue
        style = _style(block, styles)
        title = title or (one_line(block.text) if style == "Title" else "")
        if style.startswith("List"):
            out.line("- ")
        else:
            out.paragraph(_heading(style))
        _write_lines(block.text, out)
    if not out.num_characters:
        raise UnreadableError("has no text; if its pages are images, recognise their text first and save that as PDF")
    return Content(title, out.build())


def _style(paragraph: Paragraph, known: dict[str | None, str]) -> str:
    style_id = paragraph._p.style  # the public way searches all styles for each paragraph
    if style_id not in known:
        known[style_id] = (paragraph.style.name if paragraph.style is not None else "") or ""
    return known[style_id]


def _heading(style: str) -> str:
    if style == "Title":
        return "# "
    word, _, level = style.partition(" ")
    return "#" * min(int(level), 6) + " " if word == "Heading" and level.isdecimal() and level != "0" else ""


def _write_lines(text: str, out: TextBuilder) -> None:
    for i, line in enumerate(text.split("\n")):
        if i:
            out.line()
        out.text(line)


def _write_table(table: Table, out: TextBuilder) -> None:
    out.paragraph()
    for row in table.rows:
        out.line()
        # Cells as stored: `row.cells` repeats a merged cell, and looks through all rows above it.
        cells = (" ".join(_Cell(cell, table).text.split()) for cell in row._tr.tc_lst)
        out.text(" | ".join(cells))
    out.paragraph()
