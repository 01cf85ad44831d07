"""Text, Markdown and source code: decoded and otherwise as written. Titles are found without regular expressions."""

from __future__ import annotations

from pathlib import PurePath

from paceline.rag.parsing.kinds import FULL_STOPS, MAX_TITLE, kind_of
from paceline.rag.parsing.readers.content import Content
from paceline.rag.parsing.readers.decoding import decode


def read(data: bytes, name: str) -> Content:
    text = decode(data)
    return Content(title_of(name, text), text)


def title_of(name: str, text: str) -> str:
    """The title: a Markdown heading at the very beginning, else a short first line followed by a blank one, else "".

    Source code is titled with its file's name, which says more than its first line.
    """
    kind = kind_of(name)
    if kind == "code":
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
