"""JSON and JSON lines: a line for each value, with the path to it, so that a passage of it can be read by itself.

Elements of lists of objects are paragraphs. Text that is no JSON after all, such as a configuration with comments, is
kept as written. A notebook is its cells and what they printed. Not handled: numbers beyond the precision of floats,
which become the nearest; pictures of notebooks, and outputs that are HTML alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.rag.parsing.kinds import MAX_TITLE, kind_of
from paceline.rag.parsing.readers.content import Content, TextBuilder, UnreadableError
from paceline.rag.parsing.readers.decoding import decode

_MAX_DEPTH = 64  # of containers in containers; deeper ones are written as they are


def read(data: bytes, name: str) -> Content:
    text = decode(data)
    out = TextBuilder()
    try:
        if kind_of(name) == "ipynb":
            return _notebook(text)
        values = list(_values(text))
        for number, value in enumerate(values):
            if len(values) > 1:
                out.paragraph()
            _write(value, f"[{number}]" if len(values) > 1 else "", out, 0)
    except (ValueError, RecursionError):
        return Content(name, text)
    return Content(name, out.build() or text)


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
        for key, part in value:
            _write(part, f"{path}.{key}" if path else key, out, depth + 1)
    elif isinstance(value, list) and depth < _MAX_DEPTH and any(isinstance(part, tuple | list) for part in value):
        for number, part in enumerate(value):
            out.paragraph()
            _write(part, f"{path}[{number}]", out, depth + 1)
    else:
        out.line()
        out.text(f"{path}: {_shown(value)}" if path else _shown(value))


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, tuple):
        return f"{{{', '.join(f'{key}: {_shown(part)}' for key, part in value)}}}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _notebook(text: str) -> Content:
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
    if not out.num_characters:
        raise UnreadableError("has no cells with text; write something in it or leave it out")
    first = out.build().partition("\n")[0]
    return Content(first.lstrip("# ")[:MAX_TITLE] if first.startswith("#") else "", out.build())


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
