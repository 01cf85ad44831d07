"""Where in a document a chunk stands, as people say it: its page, slide, heading, definition, lines or rows. Pure.

A place is kept with its chunk and shown in citations; it is not part of what is embedded or of a prompt. Not handled:
headings that are only underlined, and lines of a source file that is no text, such as a workbook.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from paceline.rag.parsing.kinds import Kind

MAX_PLACE = 120  # characters
_HEADING = re.compile(r"#{1,6}[ \t]")
_FENCE = re.compile(r"[ \t]*(```|~~~)")
_MODIFIER = (
    r"(?:export|default|public|private|protected|internal|static|final|abstract|async|pub|pub\([a-z]{1,16}\)|unsafe)"
)
_DEFINITION = re.compile(
    rf"[ \t]{{0,8}}(?:{_MODIFIER}[ \t]{{1,8}}){{0,4}}"
    r"(?:def|class|function|func|fn|interface|struct|enum|trait|impl|module|namespace|object|record|type)"
    r"[ \t]{1,8}(?:\([^()\n]{0,80}\)[ \t]{0,8})?(?P<name>[A-Za-z_$][\w$.:]{0,79})"
)
_LEAD = re.compile(r"[ \t]*(?:@|#\[|#(?!!)|//|/\*|\*)")  # decorators, attributes and comments before a definition
Place = Callable[[int, int], str]  # of the characters [start, end) of a text


def heading_starts(text: str) -> tuple[tuple[int, int, str], ...]:
    """(start, end, words) of each Markdown heading. Lines within code fences are not headings."""
    found = []
    position, fenced = 0, False
    for line in text.split("\n"):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and _HEADING.match(line):
            found.append((position, position + len(line), line.strip("# \t")))
        position += len(line) + 1
    return tuple(found)


def definitions(text: str) -> tuple[tuple[int, str], ...]:
    """(start, name) of each function, class and the like of source code, by its first line. The comments and decorators
    directly above belong to it."""
    found = []
    position, lead = 0, -1  # where the lines that lead to the next definition begin; -1: there are none
    for line in text.split("\n"):
        if definition := _DEFINITION.match(line):
            found.append((position if lead < 0 else lead, definition["name"].rstrip(":.")))
            lead = -1
        elif _LEAD.match(line):
            lead = position if lead < 0 else lead
        else:
            lead = -1
        position += len(line) + 1
    return tuple(found)


def places(text: str, kind: Kind, pages: Sequence[int] = ()) -> Place:
    """The function that names a chunk's place. pages: where each page or slide begins, in characters."""
    if pages:
        noun = "slide" if kind == "pptx" else "page"
        return lambda start, end: page_of(pages, start, end, noun)
    if kind in ("markdown", "html", "docx", "epub", "odt", "rtf", "eml", "ipynb", "xlsx"):
        headings = [(start, words) for start, _, words in heading_starts(text)]
        if kind != "xlsx":
            return lambda start, end: _last(headings, start, end)
    if kind == "json":
        return lambda start, _end: _path(text, start)
    breaks = [found.start() for found in re.finditer("\n", text)]
    if kind == "xlsx":
        return lambda start, end: _rows(headings, breaks, start, end)
    noun = "row" if kind == "csv" else "line"
    names = definitions(text) if kind == "code" else ()

    def lines(start: int, end: int) -> str:
        first, last = bisect_left(breaks, start) + 1, bisect_left(breaks, max(end - 1, start)) + 1
        name = _last(names, start, start + 1)
        return ", ".join(part for part in (_range(noun, first, last), name) if part)

    return lines


def page_of(pages: Sequence[int], start: int, end: int, noun: str = "page") -> str:
    """The page or pages of the characters [start, end), as people write them; "" for a text without pages."""
    if not pages:
        return ""
    first, last = bisect_right(pages, start), bisect_left(pages, max(end, start + 1))
    return _range(noun, first, last)


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first >= last else f"{noun}s {first}\u2013{last}"


def _last(named: Sequence[tuple[int, str]], start: int, end: int) -> str:
    """The name that holds at `start`, or else the first one before `end`."""
    at = bisect_right(named, start, key=lambda each: each[0])
    if at:
        return named[at - 1][1][:MAX_PLACE]
    return named[0][1][:MAX_PLACE] if named and named[0][0] < end else ""


def _rows(sheets: Sequence[tuple[int, str]], breaks: Sequence[int], start: int, end: int) -> str:
    """The sheet, and the rows of it, which are its lines after the heading."""
    at = bisect_right(sheets, start, key=lambda each: each[0])
    name = _last(sheets, start, end)
    if not at or (at < len(sheets) and end > sheets[at][0]):
        return name
    heading = bisect_left(breaks, sheets[at - 1][0])
    first, last = bisect_left(breaks, start) - heading, bisect_left(breaks, max(end - 1, start)) - heading
    return f"{name}, {_range('row', max(1, first), last)}" if last else name


def _path(text: str, start: int) -> str:
    """The path before the colon of the line in which a chunk of JSON begins."""
    begin = text.rfind("\n", 0, start) + 1
    end = text.find("\n", begin)
    path, colon, _ = text[begin : end if end >= 0 else len(text)].partition(": ")
    return path[:MAX_PLACE] if colon else ""
