"""JSON and JSON lines: a line for each value, with the path to it, so that a passage of it can be read by itself.

Elements of lists of objects are paragraphs. Text that is no JSON after all, such as a configuration with comments, is
kept as written. Not handled: numbers beyond the precision of floats, which become the nearest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from paceline.rag.parsing.readers.content import Content, TextBuilder
from paceline.rag.parsing.readers.decoding import decode

_MAX_DEPTH = 64  # of containers in containers; deeper ones are written as they are


def read(data: bytes, name: str) -> Content:
    text = decode(data)
    try:
        values = list(_values(text))
    except (ValueError, RecursionError):
        return Content(name, text)
    out = TextBuilder()
    for number, value in enumerate(values):
        if len(values) > 1:
            out.paragraph()
        _write(value, f"[{number}]" if len(values) > 1 else "", out, 0)
    return Content(name, out.build() or text)


def _values(text: str) -> Iterator[object]:
    """The one value of a JSON text, or that of each line. Raises ValueError."""
    try:
        yield json.loads(text)
    except ValueError:
        for line in text.split("\n"):
            if line.strip():
                yield json.loads(line)


def _write(value: object, path: str, out: TextBuilder, depth: int) -> None:
    if isinstance(value, dict) and value and depth < _MAX_DEPTH:
        for key, part in value.items():
            _write(part, f"{path}.{key}" if path else key, out, depth + 1)
    elif isinstance(value, list) and depth < _MAX_DEPTH and any(isinstance(part, dict | list) for part in value):
        for number, part in enumerate(value):
            out.paragraph()
            _write(part, f"{path}[{number}]", out, depth + 1)
    else:
        out.line()
        out.text(f"{path}: {_shown(value)}" if path else _shown(value))


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
