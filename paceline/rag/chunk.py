"""Chunking: overlapping token windows that end, where possible, at a heading, paragraph or sentence boundary; in source
code, at a definition.

Pure and deterministic. Tokens are counted by the caller's function, word by word, so a chunk stays within its size as
long as count(a + b) <= count(a) + count(b), which holds for WordPiece exactly. Every character is in some chunk.
Chunks are made one at a time, so that a long text can be read beside others.
Not handled: tables and sentence ends after abbreviations are split like any other text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.rag.parsing.kinds import FULL_STOPS, Kind
from paceline.rag.parsing.parsed import Parsed
from paceline.rag.places import Place, definitions, heading_starts, places
from paceline.rag.records import titled

CHUNK_TOKENS = 160  # about 120 words: one topic of a small document, and well within MiniLM's 256
OVERLAP_TOKENS = 32  # about two sentences

# A piece is a word and the space after it. Scripts without spaces have long "words", which also end at full stops.
_PIECE = re.compile(rf"\s+|[^\s{FULL_STOPS}]{{1,64}}[{FULL_STOPS}]{{0,64}}\s*|[{FULL_STOPS}]{{1,64}}\s*")
_SENTENCE_END = re.compile(rf"[.!?…{FULL_STOPS}][\"'”\u2019»)\]*_]*$")
# Boundaries between pieces, from the worst to the best end of a chunk.
_INSIDE, _WORD, _LINE, _SENTENCE, _PARAGRAPH, _SECTION = range(6)


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


@dataclass(frozen=True, slots=True)
class _Piece:
    """The smallest unit that is not split: a word, or a part of a very long one."""

    end: int  # characters
    tokens: int
    boundary: int  # after it


def split_document(parsed: Parsed, count: Callable[[str], int], *, chunk_tokens: int, overlap: int) -> Iterator[Chunk]:
    """The chunks of a document that have any text, as `split` makes them."""
    chunks = split(
        parsed.text, count, title=parsed.title, pages=parsed.pages, kind=parsed.kind, chunk_tokens=chunk_tokens,
        overlap=overlap,
    )  # fmt: skip
    return (chunk for chunk in chunks if chunk.text.strip())


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

    pages: where each page begins, in characters; the page is then part of a chunk's title.
    Raises ValueError unless 0 <= overlap <= chunk_tokens / 2. Only a single character of more than `chunk_tokens`
    tokens makes a larger chunk.
    """
    if not 0 <= overlap <= chunk_tokens / 2:
        raise ValueError(f"overlap must be from 0 to half of chunk_tokens, got {overlap} of {chunk_tokens}")
    pieces = _Pieces(_pieces(text, count, chunk_tokens, kind == "code"))
    return _chunks(text, pieces, title, places(text, kind, pages), bool(pages), chunk_tokens, overlap)


def _chunks(
    text: str, pieces: _Pieces, title: str, place: Place, has_pages: bool, chunk_tokens: int, overlap: int
) -> Iterator[Chunk]:
    first, last = 0, 0  # the chunk is pieces[first:last]
    while pieces.reach(first, last, chunk_tokens) > last:
        previous, last = last, _last_piece(pieces, first, last, chunk_tokens)
        assert last > previous >= first, (first, previous, last)
        start, end = pieces.offsets[first], pieces.offsets[last]
        body = text[start:end]
        where = place(start + len(body) - len(body.lstrip()), start + len(body.rstrip()))
        shown = "" if _begins_with(body, title) else title
        page = where if has_pages else ""
        yield Chunk(start, end, body, ", ".join(part for part in (shown, page) if part), where)
        first = _next_first(pieces, last, overlap, chunk_tokens)


def _begins_with(body: str, title: str) -> bool:
    return body.lstrip("# \t\n").startswith(title)


class _Pieces:
    """The pieces of a text, found as far as they are needed."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._more = pieces
        self.boundaries: list[int] = []  # after each piece
        self.offsets = [0]  # characters before each piece, and after the last one found
        self.sums = [0]  # tokens before each piece, and after the last one found

    def __len__(self) -> int:
        return len(self.boundaries)

    def reach(self, first: int, last: int, limit: int) -> int:
        """Find more than `limit` tokens from the piece `first` on, and two pieces after `last`, unless the text ends
        before. Returns the number of pieces found so far.
        """
        while self.sums[-1] - self.sums[first] <= limit or len(self) < last + 2:
            piece = next(self._more, None)
            if piece is None:
                break
            self.boundaries.append(piece.boundary)
            self.offsets.append(piece.end)
            self.sums.append(self.sums[-1] + piece.tokens)
        return len(self)


def _last_piece(pieces: _Pieces, first: int, previous: int, limit: int) -> int:
    """The end of a chunk: the best boundary in the second half of its window, the latest among equals."""
    sums = pieces.sums
    furthest = max(bisect_right(sums, sums[first] + limit) - 1, previous + 1)
    if furthest >= len(pieces):
        return len(pieces)
    earliest = max(bisect_right(sums, sums[first] + limit // 2), previous + 1)
    return max(range(min(earliest, furthest), furthest + 1), key=lambda last: (pieces.boundaries[last - 1], last))


def _next_first(pieces: _Pieces, last: int, overlap: int, limit: int) -> int:
    """The start of the next chunk: the best boundary that repeats at most `overlap` tokens, the earliest among equals.

    Nothing is repeated at the beginning of a section, or where the next piece needs the room.
    """
    sums = pieces.sums
    if last == len(pieces) or pieces.boundaries[last - 1] == _SECTION:
        return last
    earliest = max(sums[last] - overlap, sums[last + 1] - limit)
    candidates = range(bisect_left(sums, earliest), last)
    return max(candidates, key=lambda first: (min(pieces.boundaries[first - 1], _SENTENCE), -first), default=last)


def _pieces(text: str, count: Callable[[str], int], limit: int, is_code: bool) -> Iterator[_Piece]:
    known: dict[str, int] = {}  # token counts of words, which repeat

    def tokens_of(word: str) -> int:
        if word not in known:
            known[word] = count(word)
        return known[word]

    sections = (_definition_starts(text), frozenset[int]())
    if not is_code:
        headings = heading_starts(text)
        sections = frozenset(start for start, _, _ in headings), frozenset(end for _, end, _ in headings)
    for match in _PIECE.finditer(text):
        parts = _split_word(match[0], tokens_of, limit)
        end = match.start()
        for i, part in enumerate(parts):
            end += len(part)
            yield _Piece(end, tokens_of(part), _boundary(match, sections) if i == len(parts) - 1 else _INSIDE)


def _split_word(word: str, tokens_of: Callable[[str], int], limit: int) -> list[str]:
    """A word, in halves of halves until each part has at most `limit` tokens."""
    if len(word) == 1 or tokens_of(word) <= limit:
        return [word]
    half = len(word) // 2
    return _split_word(word[:half], tokens_of, limit) + _split_word(word[half:], tokens_of, limit)


def _definition_starts(text: str) -> frozenset[int]:
    """Offsets at which definitions begin: known by their words, or lines at the margin after an empty one, which in
    most languages are definitions or their comments."""
    starts = {start for start, _ in definitions(text)}
    position, after_empty = 0, False
    for line in text.split("\n"):
        if after_empty and line[:1].strip() and line[0] not in ")]}":
            starts.add(position)
        after_empty = not line.strip()
        position += len(line) + 1
    return frozenset(starts)


def _boundary(match: re.Match[str], sections: tuple[frozenset[int], frozenset[int]]) -> int:
    """The boundary after a piece. sections: where they begin, and where their headings end."""
    begins, ends = sections
    word = match[0].rstrip()
    space = match[0][len(word) :]
    if match.end() in begins:
        return _SECTION
    if not space:
        return _SENTENCE if word[-1] in FULL_STOPS else _INSIDE
    if match.start() + len(word) in ends:
        return _WORD  # a heading stays with the text below it
    if space.count("\n") > 1:
        return _PARAGRAPH
    if _SENTENCE_END.search(word):
        return _SENTENCE
    return _LINE if "\n" in space else _WORD
