"""CSV: one line a row. Under a header each value has its column's name, so that a passage can be read alone.

The delimiter is the candidate that divides the first rows most evenly. `csv.Sniffer` is not used: its regular
expressions backtrack.
"""

from __future__ import annotations

import csv
import io

from paceline.rag.parsing.kinds import MAX_TEXT_BYTES
from paceline.rag.parsing.readers.content import Content, TextBuilder, UnreadableError
from paceline.rag.parsing.readers.decoding import decode

_DELIMITERS = ",;\t|"
_SAMPLE_ROWS = 20
_SAMPLE = 64 * 1024  # characters
_MAX_COLUMN_NAME = 80  # characters


def read(data: bytes, name: str) -> Content:
    text = decode(data)
    csv.field_size_limit(MAX_TEXT_BYTES)
    delimiter = "\t" if name.lower().endswith(".tsv") else _delimiter(text[:_SAMPLE])
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    out = TextBuilder()
    try:
        header = next(rows, [])
        columns = [" ".join(cell.split()) for cell in header]
        if not _is_header(columns):
            _write(out, header, [])
            columns = []
        for row in rows:
            _write(out, row, columns)
    except csv.Error as error:
        raise UnreadableError(
            f"is not a CSV file ({error}, at line {rows.line_num}); export it again, or name it .txt", "invalid_file"
        ) from None
    if not out.num_characters:  # a header alone
        out.text(" | ".join(columns))
    return Content("", out.build())


def _write(out: TextBuilder, row: list[str], columns: list[str]) -> None:
    out.line()
    cells = [" ".join(cell.split()) for cell in row]
    if len(columns) == len(cells) and columns:
        out.text("; ".join(f"{column}: {cell}" for column, cell in zip(columns, cells, strict=True) if cell))
    else:
        out.text(" | ".join(cell for cell in cells if cell))


def _is_header(cells: list[str]) -> bool:
    """True for distinct short names, none of them a number."""
    if len(cells) < 2 or len(set(cells)) < len(cells):
        return False
    return all(cell and len(cell) <= _MAX_COLUMN_NAME and not _is_number(cell) for cell in cells)


def _is_number(cell: str) -> bool:
    return any(character.isdigit() for character in cell) and not any(character.isalpha() for character in cell)


def _delimiter(sample: str) -> str:
    def evenness(delimiter: str) -> tuple[int, int]:
        rows = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
        widths = []
        try:
            for row in rows:
                if row:
                    widths.append(len(row))
                if len(widths) == _SAMPLE_ROWS:
                    break
        except csv.Error:
            return (0, 0)
        width = max(set(widths), key=widths.count, default=0)
        return (widths.count(width) if width > 1 else 0, width)

    return max(_DELIMITERS, key=evenness)
