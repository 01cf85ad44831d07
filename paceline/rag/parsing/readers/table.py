"""Tables: one line a row. Under a header each value has its column's name, so that a passage can be read alone.

The delimiter of a CSV file is the candidate that divides the first rows most evenly, and among equals the one that
leaves the most whole values. `csv.Sniffer` is not used: its regular expressions backtrack.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from paceline.rag.parsing.kinds import MAX_TEXT_BYTES
from paceline.rag.parsing.readers.content import Content, TextBuilder, UnreadableError
from paceline.rag.parsing.readers.decoding import decode

_DELIMITERS = ",;\t|"
_SAMPLE_ROWS = 20
_SAMPLE = 64 * 1024  # characters
_MAX_COLUMN_NAME = 80  # characters
_MAX_LEAD = 5  # rows above a header, such as a title
_NUMBER = re.compile(r"[-+]?\d[\d.,' \u00a0]*%?")
_YEAR = re.compile(r"(?:19|20)\d\d")


def read(data: bytes, name: str) -> Content:
    text = decode(data)
    csv.field_size_limit(MAX_TEXT_BYTES)
    first, _, rest = text.partition("\n")
    if re.fullmatch(r'"?sep=."?', first, re.IGNORECASE):  # what spreadsheet programs write and obey
        delimiter, text = first.strip('"')[-1], rest
    else:
        delimiter = "\t" if name.lower().endswith(".tsv") else _delimiter(text[:_SAMPLE])
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    out = TextBuilder()
    try:
        for line in named_rows(rows):
            out.line()
            out.text(line)
    except csv.Error as error:
        raise UnreadableError(
            f"is not a CSV file ({error}, at line {rows.line_num}); export it again, or name it .txt", "invalid_file"
        ) from None
    return Content("", out.build())


def named_rows(rows: Iterable[Sequence[str]], *, with_names: bool = False) -> Iterator[str]:
    """A line for each row, "" for an empty one. The header itself is left out if there is more, unless `with_names`."""
    cleaned = ([" ".join(cell.split()) for cell in row] for row in rows)
    sample = list(itertools.islice(cleaned, _SAMPLE_ROWS))
    at = _header(sample)
    columns = _column_names(sample[at]) if at is not None else []
    for number, row in enumerate(itertools.chain(sample, cleaned)):
        if number == at:
            if with_names or len(sample) == at + 1:
                yield " | ".join(columns).rstrip(" |")
        elif at is None or number < at or not any(row):
            yield " | ".join(row).rstrip(" |") if with_names else " | ".join(cell for cell in row if cell)
        else:
            pairs = itertools.zip_longest(columns[: len(row)], row, fillvalue="")
            yield "; ".join(f"{column}: {cell}" if column else cell for column, cell in pairs if cell)


def _header(sample: list[list[str]]) -> int | None:
    """The row that has the names of the columns: the first with more than one cell, if it can be one."""
    width = max((sum(map(bool, row)) for row in sample), default=0)
    for number, row in enumerate(sample[: _MAX_LEAD + 1]):
        filled = [cell for cell in row if cell]
        if len(filled) < 2 <= width:
            continue
        return number if _is_header(row, sample[number + 1 :]) else None
    return None


def _is_header(row: list[str], below: list[list[str]]) -> bool:
    """True for names: most are short, none is a number but a year above something else, and half of the columns that
    hold anything have one."""
    filled = [cell for cell in row if cell]
    used = max((len(each) for each in map(_trimmed, below)), default=0)
    if len(filled) < 2 or 2 * len(filled) < min(used, len(row)):
        return False
    if 2 * sum(len(cell) > _MAX_COLUMN_NAME for cell in filled) > len(filled) or all(map(_is_number, filled)):
        return False
    for column, cell in enumerate(row):
        if _is_number(cell):
            values = [each[column] for each in below if column < len(each) and each[column]]
            if not _YEAR.fullmatch(cell) or 2 * sum(bool(_YEAR.fullmatch(value)) for value in values) > len(values):
                return False
    return True


def _trimmed(row: list[str]) -> list[str]:
    return row[: next((end for end in range(len(row), 0, -1) if row[end - 1]), 0)]


def _column_names(row: list[str]) -> list[str]:
    """Names of columns, the repeated ones numbered; "" where there is none."""
    seen: Counter[str] = Counter()
    names = []
    for cell in row:
        name = cell if len(cell) <= _MAX_COLUMN_NAME else cell[:_MAX_COLUMN_NAME].rstrip() + "…"
        seen[name] += 1
        names.append(f"{name} {seen[name]}" if name and seen[name] > 1 else name)
    return names


def _is_number(cell: str) -> bool:
    return any(character.isdigit() for character in cell) and not any(character.isalpha() for character in cell)


def _delimiter(sample: str) -> str:
    def evenness(delimiter: str) -> tuple[int, float, int]:
        rows: list[list[str]] = []
        try:
            for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter):
                rows += [row] if row else []
                if len(rows) == _SAMPLE_ROWS:
                    break
        except csv.Error:
            return (0, 0.0, 0)
        widths = Counter(map(len, rows))
        width = max(widths, key=lambda each: widths[each], default=0)
        cells = [cell for row in rows for cell in row]
        whole = sum(bool(_NUMBER.fullmatch(cell)) or not any(mark in cell for mark in _DELIMITERS) for cell in cells)
        return (widths[width] if width > 1 else 0, whole / max(1, len(cells)), width)

    return max(_DELIMITERS, key=evenness)
