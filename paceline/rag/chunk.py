"""Chunking: overlapping token windows that end, where possible, at a heading, paragraph or sentence boundary.

Pure and deterministic. Tokens are counted by the caller's function, word by word, so a chunk stays within its size as
long as count(a + b) <= count(a) + count(b), which holds for WordPiece exactly. Every character is in some chunk.
Not handled: tables, code and sentence ends after abbreviations are split like any other text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from paceline.rag.records import titled

CHUNK_TOKENS = 160  # about 120 words: one topic of a small document, and well within MiniLM's 256
OVERLAP_TOKENS = 32  # about two sentences

# A piece is a word and the space after it. Scripts without spaces have long "words", which also end at full stops.
FULL_STOPS = "\u3002\uff01\uff1f"  # Chinese and Japanese . ! ?
_PIECE = re.compile(rf"\s+|[^\s{FULL_STOPS}]{{1,64}}[{FULL_STOPS}]{{0,64}}\s*|[{FULL_STOPS}]{{1,64}}\s*")
_HEADING = re.compile(r"#{1,6}[ \t]")
_FENCE = re.compile(r"[ \t]*(```|~~~)")
_SENTENCE_END = re.compile(rf"[.!?…{FULL_STOPS}][\"'”\u2019»)\]*_]*$")
# Boundaries between pieces, from the worst to the best end of a chunk.
_INSIDE, _WORD, _LINE, _SENTENCE, _PARAGRAPH, _SECTION = range(6)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document: `text` is exactly its slice [start, end)."""

    start: int  # characters
    end: int
    text: str
    title: str  # the document's, placed before the text; "" when it has none or the text begins with it

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


def split(
    text: str,
    count: Callable[[str], int],
    *,
    title: str = "",
    chunk_tokens: int = CHUNK_TOKENS,
    overlap: int = OVERLAP_TOKENS,
) -> list[Chunk]:
    """Chunks in order of position. Empty for an empty text. The title's tokens are not counted.

    Raises ValueError unless 0 <= overlap <= chunk_tokens / 2. Only a single character of more than `chunk_tokens`
    tokens makes a larger chunk.
    """
    if not 0 <= overlap <= chunk_tokens / 2:
        raise ValueError(f"overlap must be from 0 to half of chunk_tokens, got {overlap} of {chunk_tokens}")
    pieces = list(_pieces(text, count, chunk_tokens))
    offsets = [0, *(piece.end for piece in pieces)]
    sums = list(accumulate((piece.tokens for piece in pieces), initial=0))
    chunks: list[Chunk] = []
    first, last = 0, 0  # the chunk is pieces[first:last]
    while last < len(pieces):
        previous, last = last, _last_piece(pieces, sums, first, last, chunk_tokens)
        assert last > previous >= first, (first, previous, last)
        body = text[offsets[first] : offsets[last]]
        chunks.append(Chunk(offsets[first], offsets[last], body, "" if _begins_with(body, title) else title))
        first = _next_first(pieces, sums, last, overlap, chunk_tokens)
    return chunks


def _begins_with(body: str, title: str) -> bool:
    return body.lstrip("# \t\n").startswith(title)


def _last_piece(pieces: list[_Piece], sums: list[int], first: int, previous: int, limit: int) -> int:
    """The end of a chunk: the best boundary in the second half of its window, the latest among equals."""
    furthest = max(bisect_right(sums, sums[first] + limit) - 1, previous + 1)
    if furthest >= len(pieces):
        return len(pieces)
    earliest = max(bisect_right(sums, sums[first] + limit // 2), previous + 1)
    return max(range(min(earliest, furthest), furthest + 1), key=lambda last: (pieces[last - 1].boundary, last))


def _next_first(pieces: list[_Piece], sums: list[int], last: int, overlap: int, limit: int) -> int:
    """The start of the next chunk: the best boundary that repeats at most `overlap` tokens, the earliest among equals.

    Nothing is repeated at the beginning of a section, or where the next piece needs the room.
    """
    if last == len(pieces) or pieces[last - 1].boundary == _SECTION:
        return last
    earliest = max(sums[last] - overlap, sums[last + 1] - limit)
    candidates = range(bisect_left(sums, earliest), last)
    return max(candidates, key=lambda first: (min(pieces[first - 1].boundary, _SENTENCE), -first), default=last)


def _pieces(text: str, count: Callable[[str], int], limit: int) -> Iterator[_Piece]:
    known: dict[str, int] = {}  # token counts of words, which repeat

    def tokens_of(word: str) -> int:
        if word not in known:
            known[word] = count(word)
        return known[word]

    headings = _heading_starts(text)
    for match in _PIECE.finditer(text):
        parts = _split_word(match[0], tokens_of, limit)
        end = match.start()
        for i, part in enumerate(parts):
            end += len(part)
            yield _Piece(end, tokens_of(part), _boundary(match, headings) if i == len(parts) - 1 else _INSIDE)


def _split_word(word: str, tokens_of: Callable[[str], int], limit: int) -> list[str]:
    """A word, in halves of halves until each part has at most `limit` tokens."""
    if len(word) == 1 or tokens_of(word) <= limit:
        return [word]
    half = len(word) // 2
    return _split_word(word[:half], tokens_of, limit) + _split_word(word[half:], tokens_of, limit)


def _heading_starts(text: str) -> tuple[frozenset[int], frozenset[int]]:
    """Offsets at which Markdown headings begin and end. Lines within code fences are not headings."""
    begins, ends = set(), set()
    position, fenced = 0, False
    for line in text.split("\n"):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and _HEADING.match(line):
            begins.add(position)
            ends.add(position + len(line))
        position += len(line) + 1
    return frozenset(begins), frozenset(ends)


def _boundary(match: re.Match[str], headings: tuple[frozenset[int], frozenset[int]]) -> int:
    """The boundary after a piece."""
    begins, ends = headings
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
