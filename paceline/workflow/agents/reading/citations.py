"""Numbers in brackets that name sources: [2], [1, 3], [2-4], [^1], [source 2], and the same in 【】.

Brackets stand on one line. In the text of an answer, those within code are no citations: `a[1]` is an element.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Range = tuple[int, int]  # first and last number, each at most 4 digits
MAX_CONTENT: Final = 40  # characters within brackets
OPENING, CLOSING = frozenset("[【"), frozenset("]】")
_WORD: Final = r"(?:(?:sources?|passages?|documents?|docs?|refs?|s|p)\.? ?)?#?"
_NUMBERS: Final = rf"{_WORD}\d{{1,4}}(?: ?[-–] ?\d{{1,4}})?"
_CONTENT: Final = re.compile(rf"\^? ?({_NUMBERS}(?: ?(?:,|;|&|and)? ?{_NUMBERS}){{0,9}}) ?(?:†[^\n]*)?", re.I | re.A)
_RANGE: Final = re.compile(r"(\d{1,4})(?: ?[-–] ?(\d{1,4}))?", re.A)
_BRACKETED: Final = re.compile(rf"[\[【]([^\[\]【】\n]{{1,{MAX_CONTENT}}})[\]】]")
_LIKE_BRACKETED: Final = re.compile(r"[\[［【〔]([^\[\]［］【】〔〕\n]{1,80})[\]］】〕]")


@dataclass(frozen=True, slots=True)
class FoundCitation:
    start: int  # characters from the beginning of the text, the brackets included
    end: int
    ranges: tuple[Range, ...]


def numbers_within(content: str) -> tuple[Range, ...] | None:
    """The numbers of what stands in brackets; None where it is something else."""
    found = _CONTENT.fullmatch(content)
    if found is None:
        return None
    pairs = [(int(first), int(last or first)) for first, last in _RANGE.findall(found[1])]
    return tuple((min(pair), max(pair)) for pair in pairs)


def find_citations(line: str) -> list[FoundCitation]:
    """All citations of one line."""
    return [
        FoundCitation(found.start(), found.end(), ranges)
        for found in _BRACKETED.finditer(line)
        if (ranges := numbers_within(found[1])) is not None
    ]


def without_citations(line: str) -> str:
    """The line without them, valid or not, and without the blanks they leave."""
    kept = _BRACKETED.sub(lambda found: found[0] if numbers_within(found[1]) is None else " ", line)
    return re.sub(r"(?<!\s)\s++([.,;:!?])", r"\1", " ".join(kept.split()))


def neutralised(line: str) -> str:
    """A line of untrusted text in which what is, or looks like, a citation stands in round brackets."""

    def replaced(found: re.Match[str]) -> str:
        plain = unicodedata.normalize("NFKC", found[1])
        seen = "".join(character for character in plain if unicodedata.category(character) != "Cf")
        return found[0] if numbers_within(" ".join(seen.split())) is None else f"({found[1]})"

    return _LIKE_BRACKETED.sub(replaced, line)


def resolved(ranges: Sequence[Range], count: int) -> list[int]:
    """The numbers from 1 to `count` among these, distinct and in order; others are dropped."""
    numbers = [number for first, last in ranges for number in range(max(first, 1), min(last, count) + 1)]
    return list(dict.fromkeys(numbers))


class CitationScanner:
    """Finds citations in text that comes in pieces, as soon as their brackets close."""

    def __init__(self) -> None:
        self._at = 0
        self._start: int | None = None
        self._content: list[str] = []
        self._ticks = 0  # on this line
        self._only_ticks = True  # and blanks, on this line so far
        self._fenced = False

    def feed(self, piece: str) -> list[FoundCitation]:
        found: list[FoundCitation] = []
        for character in piece:
            self._at += 1
            if character == "\n":
                self._start, self._ticks, self._only_ticks = None, 0, True
            elif character == "`":
                self._start, self._ticks = None, self._ticks + 1
                if self._only_ticks and self._ticks == 3:
                    self._fenced = not self._fenced
            else:
                self._only_ticks = self._only_ticks and character.isspace()
                if not self._fenced and self._ticks % 2 == 0:
                    found += self._outside_code(character)
        return found

    def _outside_code(self, character: str) -> list[FoundCitation]:
        if character in OPENING:
            self._start, self._content = self._at - 1, []
        elif self._start is not None and character in CLOSING:
            start, self._start = self._start, None
            ranges = numbers_within("".join(self._content))
            return [] if ranges is None else [FoundCitation(start, self._at, ranges)]
        elif self._start is not None:
            self._content.append(character)
            if len(self._content) > MAX_CONTENT:
                self._start = None
        return []
