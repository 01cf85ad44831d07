"""Text in all its forms: as written, Markdown and source code; tables (CSV); JSON and notebooks.

Tables: one line a row. Under a header each value has its column's name, so that a passage can be read alone. The
delimiter of a CSV file is the candidate that divides the first rows most evenly, and among equals the one that leaves
the most whole values. `csv.Sniffer` is not used: its regular expressions backtrack.

JSON and JSON lines: a line for each value, with the path to it. Elements of lists of objects are paragraphs: a line
with all their values, as a row of a table, where that is not long. What is no JSON after all, such as a configuration
with comments, is kept as written. A notebook is its cells and what they printed. Not handled: numbers beyond the
precision of floats, which become the nearest; pictures of notebooks, and outputs that are HTML alone.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from paceline.rag.parsing.kinds import FULL_STOPS, MAX_TEXT_BYTES, MAX_TITLE, fence_after, kind_of
from paceline.rag.parsing.readers.content import ReadText, TextBuilder, UnreadableError, decode


# ---- text, Markdown, source code ------------------------------------------------------------------------------------
def read_text(data: bytes, name: str) -> ReadText:
    text = decode(data)
    if name.lower().endswith(".org"):
        text = _from_org(text)
    return ReadText(title_of(name, text), _with_tables(text) if kind_of(name) == "markdown" else text)


_ORG_HEADING = re.compile(r"(\*++) ")
_ORG_WORD = re.compile(r"\s*#\+(begin_|end_|title:)?+(.*)", re.IGNORECASE)
_ORG_DRAWER = re.compile(r"\s*:[\w-]++:\s*$")


def _from_org(text: str) -> str:
    """Markdown of a text of Org mode: its title first, headings below it, fences around blocks, no drawers."""
    title, lines = "", list[str]()
    fenced = drawn = False
    for line in text.split("\n"):
        word = _ORG_WORD.match(line)
        kind = (word[1] or "").lower() if word else ""
        if word and kind in ("begin_", "end_"):
            fenced = kind == "begin_"
            lines.append("```")
        elif fenced:
            lines.append(line)
        elif _ORG_DRAWER.match(line):
            drawn = line.strip().lower() == ":properties:"
        elif drawn or line.startswith("# -*-"):
            continue
        elif word:
            title = title or (word[2].strip() if kind else "")
            lines += [] if kind else [word[2]]
        elif heading := _ORG_HEADING.match(line):
            lines.append("#" * min(6, len(heading[1]) + 1) + line[heading.end() - 1 :])
        else:
            lines.append(line.removeprefix("# ").replace("-+-", "-|-") if line[:1] in ("#", "|") else line)
    return "\n".join([*([f"# {title}", ""] if title else []), *lines])


def _with_tables(text: str) -> str:
    """A Markdown text whose tables have the names of their columns in each row, as those of other kinds."""
    lines = text.split("\n")
    made: list[str] = []
    at, fence = 0, ""
    while at < len(lines):
        line, end = lines[at], at + 1
        fence = fence_after(line, fence)
        if not fence and "|" in line and end < len(lines) and set("|-") <= set(lines[end]) <= set("|-: \t"):
            end = next((i for i in range(end + 1, len(lines)) if "|" not in lines[i]), len(lines))
            rows = (row.strip().removeprefix("|").removesuffix("|").strip() for row in [line, *lines[at + 2 : end]])
            table = "\n".join(rows)
            named = with_named_cells(table)
            made += lines[at:end] if named == table else [named]
        else:
            made.append(line)
        at = end
    return "\n".join(made)


def title_of(name: str, text: str) -> str:
    """The title: a Markdown heading at the very beginning, else a short first line followed by a blank one, else "".

    Source code is titled with its file's name, which says more than its first line.
    """
    kind = kind_of(name)
    if kind in ("code", "log"):
        return PurePath(name).name[:MAX_TITLE]
    lines = text.lstrip().split("\n", 2)
    first, second = lines[0].strip(), lines[1].strip() if len(lines) > 1 else ""
    if kind != "text":
        heading = _heading(first)
        if heading is not None:
            return heading[:MAX_TITLE]
        if first and _is_underline(second):
            return first[:MAX_TITLE]
    alone = len(lines) > 2 and not second
    return first if alone and 0 < len(first) <= MAX_TITLE and first[-1] not in f".!?:;,{FULL_STOPS}" else ""


def _heading(line: str) -> str | None:
    """The text of an ATX heading (CommonMark 4.2); None if the line is not a heading."""
    text = line.lstrip("#")
    if not 1 <= len(line) - len(text) <= 6 or not text.startswith((" ", "\t")):
        return None
    text = text.strip(" \t")
    without_marks = text.rstrip("#")
    return without_marks.rstrip(" \t") if without_marks.endswith((" ", "\t")) or not without_marks else text


def _is_underline(line: str) -> bool:
    """The second line of a setext heading (CommonMark 4.3), without blanks around."""
    return bool(line) and (line.strip("=") == "" or (len(line) > 1 and line.strip("-") == ""))


# ---- tables ---------------------------------------------------------------------------------------------------------
_DELIMITERS = ",;\t|"
_SAMPLE_ROWS = 20
_SAMPLE = 64 * 1024  # characters
_MAX_COLUMN_NAME = 80  # characters
_MAX_LEAD = 5  # rows above a header, such as a title
_MIN_ROWS = 3  # of a table in a text, where one row could not be taken for another
_NUMBER = re.compile(r"[-+]?\d[\d.,' \u00a0]*%?")
_YEAR = re.compile(r"(?:19|20)\d\d")


def read_table(data: bytes, name: str) -> ReadText:
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
    return ReadText(PurePath(name).name[:MAX_TITLE], out.build())


def named_rows(rows: Iterable[Sequence[str]], *, with_names: bool = False) -> Iterator[str]:
    """A line for each row, "" for an empty one. The header itself is left out if there is more, and it is whole in each
    row, unless `with_names`."""
    cleaned = ([" ".join(cell.split()) for cell in row] for row in rows)
    sample = list(itertools.islice(cleaned, _SAMPLE_ROWS))
    at = _header(sample)
    names = sample[at] if at is not None else []
    columns, are_cut = _column_names(names), any(len(each) > _MAX_COLUMN_NAME for each in names)
    for number, row in enumerate(itertools.chain(sample, cleaned)):
        if number == at:
            if with_names or are_cut or len(sample) == at + 1:
                yield " | ".join(names if are_cut else columns).rstrip(" |")
        elif at is None or number < at or not any(row):
            yield " | ".join(row).rstrip(" |") if with_names else " | ".join(cell for cell in row if cell)
        else:
            pairs = itertools.zip_longest(columns[: len(row)], row, fillvalue="")
            yield "; ".join(f"{column}: {cell}" if column else cell for column, cell in pairs if cell)


def with_named_cells(table: str) -> str:
    """Lines of cells, with the names of the columns in each row but the first, if that has names and all rows have as
    many cells; so that a row can be read alone. Of a form, the name and the value in each."""
    rows = [re.split(r" ?\| ?", line) for line in table.split("\n")]
    if len(rows) >= _MIN_ROWS and _is_form(rows):
        return "\n".join(f"{name.removesuffix(':')}: {value}" for name, value in rows)
    if len(rows) < _MIN_ROWS or len(set(map(len, rows))) != 1 or _header(rows[:_SAMPLE_ROWS]) != 0:
        return "\n".join(line.rstrip(" |") for line in table.split("\n"))  # without empty cells at the end
    return "\n".join(named_rows(rows, with_names=True))


def _is_form(rows: list[list[str]]) -> bool:
    """True of two columns that are names and values: no name is a number, and values are of several kinds."""
    if not all(len(row) == 2 and all(row) and not _is_number(row[0]) and ": " not in row[0] for row in rows):
        return False
    return len({_kind_of_value(value) for _, value in rows[1:]}) > 1


def _kind_of_value(value: str) -> str:
    has_digit = any(map(str.isdigit, value))
    is_code = any(any(map(str.isdigit, word)) and any(map(str.isalpha, word)) for word in value.split())
    return "code" if is_code else "number" if has_digit else "words"


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


# ---- JSON -----------------------------------------------------------------------------------------------------------
_MAX_DEPTH = 64  # of containers in containers; deeper ones are written as they are
_MAX_ROW = 500  # characters: about as many tokens as a chunk has


def read_records(data: bytes, name: str) -> ReadText:
    text = decode(data)
    try:
        if kind_of(name) == "ipynb":
            return _notebook(text)
        return ReadText(name, written(list(_values(text))) or text)
    except (ValueError, RecursionError):
        return ReadText(name, text)


def written(values: Sequence[object]) -> str:
    """Values with their names, a line for each or for each record; an object is a tuple of its pairs."""
    out = TextBuilder()
    for number, value in enumerate(values):
        if len(values) > 1:
            out.paragraph()
        _write(value, f"[{number}]" if len(values) > 1 else "", out, 0)
    return out.build()


def _values(text: str) -> Iterator[object]:
    """The one value of a JSON text, or that of each line. Raises ValueError."""
    try:
        yield json.loads(text, object_pairs_hook=tuple)
    except ValueError:
        for line in text.split("\n"):
            if line.strip():
                yield json.loads(line, object_pairs_hook=tuple)


def _write(value: object, path: str, out: TextBuilder, depth: int) -> None:
    if isinstance(value, tuple) and value and depth < _MAX_DEPTH:
        if path.endswith("]") and (row := "; ".join(_named(value, "", depth))) and len(row) <= _MAX_ROW:
            out.line()
            out.text(f"{path}: {' '.join(row.split())}")
            return
        for key, part in value:
            _write(part, f"{path}.{key}" if path else key, out, depth + 1)
    elif isinstance(value, list) and depth < _MAX_DEPTH and any(isinstance(part, tuple | list) for part in value):
        for number, part in enumerate(value):
            out.paragraph()
            _write(part, f"{path}[{number}]", out, depth + 1)
        out.paragraph()
    else:
        out.line()
        out.text(f"{path}: {_shown(value)}" if path else _shown(value))


def _named(record: tuple[tuple[str, object], ...], path: str, depth: int) -> Iterator[str]:
    """The values of an object with their names; one that is too long a row, where it holds a list of objects."""
    for key, part in record:
        name = f"{path}.{key}" if path else key
        if isinstance(part, tuple) and part and depth < _MAX_DEPTH:
            yield from _named(part, name, depth + 1)
        elif isinstance(part, list) and any(isinstance(each, tuple | list) for each in part):
            yield " " * (_MAX_ROW + 1)
        else:
            yield f"{name}: {_shown(part)}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, tuple):
        return f"{{{', '.join(f'{key}: {_shown(part)}' for key, part in value)}}}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _notebook(text: str) -> ReadText:
    """The cells of a notebook (nbformat 3 and 4). Raises ValueError for what is no JSON."""
    book = json.loads(text)
    out = TextBuilder()
    sheets = [book, *_dicts(book, "worksheets")] if isinstance(book, dict) else []
    for cell in (cell for sheet in sheets for cell in _dicts(sheet, "cells")):
        source = _joined(cell.get("source", cell.get("input")))
        out.paragraph()
        if cell.get("cell_type") != "code":
            out.verbatim(source.strip("\n"))
            continue
        _write_fenced(source, out)
        for output in _dicts(cell, "outputs"):
            shown = output.get("data")
            plain = shown.get("text/plain") if isinstance(shown, dict) else None
            error = f"{output.get('ename')}: {output.get('evalue')}" if output.get("output_type") == "error" else ""
            _write_fenced(_joined(output.get("text", plain)) or error, out)
    whole = out.build("has no cells with text; write something in it or leave it out")
    first = whole.partition("\n")[0]
    return ReadText(first.lstrip("# ")[:MAX_TITLE] if first.startswith("#") else "", whole)


def _write_fenced(text: str, out: TextBuilder) -> None:
    if text.strip():
        out.paragraph()
        out.verbatim(f"```\n{text.strip(chr(10))}\n```")
        out.paragraph()


def _dicts(holder: dict[str, Any], key: str) -> list[dict[str, Any]]:
    values = holder.get(key)
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _joined(text: object) -> str:
    """A text of a notebook, which is written whole or by lines."""
    return "".join(map(str, text)) if isinstance(text, list) else text if isinstance(text, str) else ""
