"""Chunking: overlapping token windows that end, where possible, at a heading, paragraph or sentence boundary; in source
code, at a definition. A record of a table, of a list in JSON or of a log is a chunk of its own, where there are not too
many: beside others of its form, a reader takes a value of one for that of another.

Pure and deterministic. Tokens are counted by the caller's function, word by word, so a chunk stays within its size as
long as count(a + b) <= count(a) + count(b), which holds for WordPiece exactly. Every character is in some chunk.
Chunks are made one at a time, so that a long text can be read beside others.
Not handled: tables and sentence ends after abbreviations are split like any other text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate, islice, pairwise

from paceline.rag.parsing.kinds import FULL_STOPS, MAX_TITLE, Kind, fence_after, kind_of
from paceline.rag.parsing.process import Parsed
from paceline.rag.records import titled

# Where in a document a chunk stands, as people say it: its page, slide, heading, definition, lines or rows.
#
# A place is kept with its chunk and shown in citations; it is not part of what is embedded or of a prompt. Not
# handled: headings that are only underlined, and lines of a source file that is no text, such as a workbook.


MAX_PLACE = 120  # characters
_HEADING = re.compile(r"#{1,6}[ \t]")
_MODIFIER = (
    r"(?:export|default|public|private|protected|internal|static|final|abstract|async|pub|pub\([a-z]{1,16}\)|unsafe)"
)
_DEFINITION = re.compile(
    rf"[ \t]{{0,8}}(?:{_MODIFIER}[ \t]{{1,8}}){{0,4}}"
    r"(?:def|class|function|func|fn|interface|struct|enum|trait|impl|module|namespace|object|record|type)"
    r"[ \t]{1,8}(?:\([^()\n]{0,80}\)[ \t]{0,8})?(?P<name>[A-Za-z_$][\w$.:]{0,79})"
)
_LEAD = re.compile(r"[ \t]*(?:@|#\[|#(?!!)|//|/\*|\*)")  # decorators, attributes and comments before a definition
_LINES: Mapping[Kind, str] = {"csv": "row", "ics": "entry", "srt": "cue"}  # what a line of a text stands for
Place = Callable[[int, int], str]  # of the characters [start, end) of a text


def heading_starts(text: str) -> tuple[tuple[int, int, str], ...]:
    """(start, end, words) of each Markdown heading. Lines within code fences are not headings."""
    found = []
    position, fence = 0, ""
    for line in text.split("\n"):
        before, fence = fence, fence_after(line, fence)
        if not (before or fence) and _HEADING.match(line):
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
        return lambda start, end: _range(noun, bisect_right(pages, start), bisect_left(pages, max(end, start + 1)))
    if kind in ("markdown", "html", "docx", "epub", "odt", "rtf", "eml", "ipynb", "xlsx"):
        headings = [(start, words) for start, _, words in heading_starts(text)]
        if kind != "xlsx":
            return lambda start, end: _last(headings, start, end)
    breaks = [found.start() for found in re.finditer("\n", text)]
    if kind in ("json", "xml"):
        path = lru_cache(1)(partial(_path, text, breaks))  # a line may be the whole text, and have all its chunks
        return lambda start, _end: path(bisect_left(breaks, start))
    if kind == "xlsx":
        return lambda start, end: _rows(headings, breaks, start, end)
    noun = _LINES.get(kind, "line")
    names = definitions(text) if kind == "code" else ()

    def lines(start: int, end: int) -> str:
        first, last = bisect_left(breaks, start) + 1, bisect_left(breaks, max(end - 1, start)) + 1
        name = _last(names, start, start + 1)
        return ", ".join(part for part in (_range(noun, first, last), name) if part)

    return lines


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


def _path(text: str, breaks: Sequence[int], line: int) -> str:
    """The path before the colon of a line of JSON. line: from 0."""
    begin = breaks[line - 1] + 1 if line else 0
    colon = text.find(": ", begin, breaks[line] if line < len(breaks) else len(text))
    return text[begin : min(colon, begin + MAX_PLACE)] if colon >= 0 else ""


CHUNK_TOKENS = 160  # about 120 words: one topic of a small document, and well within MiniLM's 256
OVERLAP_TOKENS = 32  # about two sentences

# A piece is a word and the space after it. Scripts without spaces have long "words", which also end at full stops.
_PIECE = re.compile(rf"\s+|[^\s{FULL_STOPS}]{{1,64}}[{FULL_STOPS}]{{0,64}}\s*|[{FULL_STOPS}]{{1,64}}\s*")
_SENTENCE_END = re.compile(rf"[.!?…{FULL_STOPS}][\"'”\u2019»)\]*_]*$")
# Boundaries between pieces, from the worst to the best end of a chunk; at the last each chunk ends.
_INSIDE, _WORD, _LINE, _SENTENCE, _PARAGRAPH, _SECTION, _RECORD = range(7)
_NO_BETTER = bytes(min(boundary, _SENTENCE) for boundary in range(256))  # where a chunk may begin as well
_PART = 2**16  # characters of a text whose pieces are found at once
MAX_RECORDS = 1000  # of a document, which are chunks of their own: a store searches the words of 20,000 chunks
_RECORDS: Mapping[Kind, re.Pattern[str]] = {  # what is before one
    "csv": re.compile(r"\n\s*"),
    "ics": re.compile(r"\n\s*"),
    "xlsx": re.compile(r"\n\s*"),
    "json": re.compile(r"\n{2,}"),
    "xml": re.compile(r"\n{2,}"),
    "log": re.compile(r"\n(?=[\[<(]?\d)"),  # a time; lines without one belong to it
}


_WITH_TABLES: frozenset[Kind] = frozenset({"markdown", "html", "docx", "pptx", "odt", "rtf", "epub", "eml"})
_ROW = re.compile(r"^[^:;|\n]{1,80}: [^;\n]{0,500}; [^:;\n]{1,80}: [^\n]*\n*", re.MULTILINE)  # a row of those


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document: `text` is exactly its slice [start, end)."""

    start: int  # characters
    end: int
    text: str
    title: str  # the document's and the page, placed before the text; no title where the text begins with it
    place: str = ""  # in the document, for people: `places`

    @property
    def titled(self) -> str:
        """Title line and text, as embedded and as put into prompts."""
        return titled(self.title, self.text)


def split_document(parsed: Parsed, count: Callable[[str], int], *, chunk_tokens: int, overlap: int) -> Iterator[Chunk]:
    """The chunks of a document that have any text, as `split` makes them, with its title or its one heading."""
    title = parsed.title
    if not title and parsed.kind != "xlsx" and kind_of(parsed.name) not in ("text", "log", "code"):
        title = _first_heading(parsed.text)
    chunks = split(
        parsed.text, count, title=title, pages=parsed.pages, kind=parsed.kind, chunk_tokens=chunk_tokens,
        overlap=overlap,
    )  # fmt: skip
    return (chunk for chunk in chunks if chunk.text.strip())


def _first_heading(text: str) -> str:
    """The heading that a text begins with; "" where one beside it follows, and where it is the first row of a table."""
    headings = heading_starts(text)
    levels = [len(text[start:end]) - len(text[start:end].lstrip("#")) for start, end, _ in headings]
    if not headings or headings[0][0] or "|" in headings[0][2] or any(level <= levels[0] for level in levels[1:]):
        return ""
    return headings[0][2][:MAX_TITLE]


def split(
    text: str,
    count: Callable[[str], int],
    *,
    title: str = "",
    pages: Sequence[int] = (),
    kind: Kind = "markdown",
    chunk_tokens: int = CHUNK_TOKENS,
    overlap: int = OVERLAP_TOKENS,
) -> Iterator[Chunk]:
    """Chunks in order of position. None for an empty text. The title's tokens are not counted.

    pages: where each page begins, in characters; the page is then part of a chunk's title, as its sheet is of a row's.
    overlap: at most half of `chunk_tokens`. Only a single character of more than `chunk_tokens` tokens makes a larger
    chunk.
    """
    assert 0 <= overlap <= chunk_tokens / 2, (overlap, chunk_tokens)
    pieces, place = _Pieces(text, count, chunk_tokens, kind), places(text, kind, pages)
    first, last = 0, 0  # the chunk is pieces[first:last]
    while pieces.reach(first, last, chunk_tokens) > last:
        previous, last = last, _last_piece(pieces, first, last, chunk_tokens)
        assert last > previous >= first, (first, previous, last)
        start, end = pieces.offsets[first], pieces.offsets[last]
        body = text[start:end]
        where = place(start + len(body) - len(body.lstrip()), start + len(body.rstrip()))
        shown = "" if body.lstrip("# \t\n").startswith(title) else title
        page = where if pages else where.rpartition(", row")[0] if kind == "xlsx" else ""
        yield Chunk(start, end, body, ", ".join(part for part in (shown, page) if part), where)
        first = _next_first(pieces, last, overlap, chunk_tokens)


class _Pieces:
    """The pieces of a text, which are not split, found as far as they are needed: words, or parts of very long ones."""

    def __init__(self, text: str, count: Callable[[str], int], limit: int, kind: Kind) -> None:
        self._text = text
        self._limit = limit
        self._known = cache(lambda piece: (count(piece), _boundary(piece)))  # of each piece, which repeat
        headings = () if kind == "code" else heading_starts(text)
        self._sections = _definition_starts(text) if kind == "code" else [start for start, _, _ in headings]
        self._records = _record_starts(text, kind)
        self._heading_ends = [end for _, end, _ in headings]
        self.boundaries = bytearray()  # after each piece
        self.offsets = [0]  # characters before each piece, and after the last one found
        self.sums = [0]  # tokens before each piece, and after the last one found

    def __len__(self) -> int:
        return len(self.boundaries)

    def reach(self, first: int, last: int, limit: int) -> int:
        """Find more than `limit` tokens from the piece `first` on, and two pieces after `last`, unless the text ends
        before. Returns the number of pieces found so far.
        """
        while self.offsets[-1] < len(self._text) and (
            self.sums[-1] - self.sums[first] <= limit or len(self) < last + 2
        ):
            self._find_more()
        return len(self)

    def _find_more(self) -> None:
        """The pieces of the next part of the text."""
        start, size, end = self.offsets[-1], _PART, 0
        while end < len(self._text):
            end = min(start + size, len(self._text))
            found = _PIECE.findall(self._text, start, end)
            if end < len(self._text):
                found.pop()  # more of it may follow
            if found:
                break
            size *= 2
        known = list(map(self._known, found))
        offsets = list(accumulate(map(len, found), initial=start))
        boundaries = bytearray([boundary for _, boundary in known])
        # A heading stays with the text below it.
        for position in _between(self._heading_ends, start, offsets[-1]):
            piece = bisect_left(offsets, position) - 1
            if offsets[piece] + len(found[piece].rstrip()) == position < offsets[piece + 1]:
                boundaries[piece] = _WORD
        for positions, boundary in ((self._sections, _SECTION), (self._records, _RECORD)):
            for position in _between(positions, start, offsets[-1]):
                piece = bisect_left(offsets, position)
                if offsets[piece] == position:
                    boundaries[piece - 1] = boundary
        tokens = [count for count, _ in known]
        if max(tokens) > self._limit:
            found, tokens, boundaries = self._split_long(found, tokens, boundaries)
            offsets = list(accumulate(map(len, found), initial=start))
        self.boundaries += boundaries
        self.offsets += offsets[1:]
        self.sums += list(accumulate(tokens, initial=self.sums[-1]))[1:]

    def _split_long(
        self, pieces: list[str], tokens: list[int], boundaries: bytearray
    ) -> tuple[list[str], list[int], bytearray]:
        """The same with each piece in halves of halves until it has at most `limit` tokens, or is one character."""
        parts: list[str] = []
        counts: list[int] = []
        ends = bytearray()
        todo = list(zip(pieces, tokens, boundaries, strict=True))[::-1]
        while todo:
            piece, count, boundary = todo.pop()
            if count > self._limit and len(piece) > 1:
                half = len(piece) // 2
                todo.append((piece[half:], self._known(piece[half:])[0], boundary))
                todo.append((piece[:half], self._known(piece[:half])[0], _INSIDE))
            else:
                parts.append(piece)
                counts.append(count)
                ends.append(boundary)
        return parts, counts, ends


def _between(positions: Sequence[int], start: int, end: int) -> Sequence[int]:
    """Those after `start`, and not after `end`."""
    return positions[bisect_right(positions, start) : bisect_right(positions, end)]


def _last_piece(pieces: _Pieces, first: int, previous: int, limit: int) -> int:
    """The end of a chunk: the best boundary in the second half of its window, the latest among equals."""
    sums = pieces.sums
    furthest = max(bisect_right(sums, sums[first] + limit) - 1, previous + 1)
    if (record := pieces.boundaries.find(_RECORD, previous, furthest)) >= 0:
        return record + 1
    if furthest >= len(pieces):
        return len(pieces)
    earliest = min(max(bisect_right(sums, sums[first] + limit // 2), previous + 1), furthest)
    window = pieces.boundaries[earliest - 1 : furthest]
    return earliest + window.rindex(max(window))


def _next_first(pieces: _Pieces, last: int, overlap: int, limit: int) -> int:
    """The start of the next chunk: the best boundary that repeats at most `overlap` tokens, the earliest among equals.

    Nothing is repeated at the beginning of a section, or where the next piece needs the room.
    """
    sums = pieces.sums
    if last == len(pieces) or pieces.boundaries[last - 1] >= _SECTION:
        return last
    earliest = bisect_left(sums, max(sums[last] - overlap, sums[last + 1] - limit))
    if earliest >= last:
        return last
    window = pieces.boundaries[earliest - 1 : last - 1].translate(_NO_BETTER)
    return earliest + window.index(max(window))


def _definition_starts(text: str) -> list[int]:
    """Offsets at which definitions begin: known by their words, or lines at the margin after an empty one, which in
    most languages are definitions or their comments."""
    starts = {start for start, _ in definitions(text)}
    position, after_empty = 0, False
    for line in text.split("\n"):
        if after_empty and line[:1].strip() and line[0] not in ")]}":
            starts.add(position)
        after_empty = not line.strip()
        position += len(line) + 1
    return sorted(starts)


def _record_starts(text: str, kind: Kind) -> list[int]:
    """Offsets at which records begin but the first, where a text has records, and not too many. The first row of a
    sheet stands below its heading and the names of its columns."""
    if kind in _RECORDS:
        starts = [found.end() for found in islice(_RECORDS[kind].finditer(text), MAX_RECORDS)]
    elif kind in _WITH_TABLES:
        rows = [found.span() for found in islice(_ROW.finditer(text), MAX_RECORDS)]
        later = {start for (_, end), (start, _) in pairwise(rows) if start == end}
        starts = sorted(later | {end for start, end in rows if start in later})
    else:
        return []
    if len(starts) >= MAX_RECORDS:
        return []
    if kind == "xlsx":
        headings = heading_starts(text)
        for (_, end, _), following in zip(headings, [*(start for start, _, _ in headings[1:]), len(text)], strict=True):
            at = bisect_right(starts, end)
            del starts[at : min(at + 2, bisect_left(starts, following))]
    return starts


def _boundary(piece: str) -> int:
    """The boundary after a piece, wherever it stands."""
    word = piece.rstrip()
    space = piece[len(word) :]
    if not space:
        return _SENTENCE if word[-1] in FULL_STOPS else _INSIDE
    if space.count("\n") > 1:
        return _PARAGRAPH
    if _SENTENCE_END.search(word):
        return _SENTENCE
    return _LINE if "\n" in space else _WORD
