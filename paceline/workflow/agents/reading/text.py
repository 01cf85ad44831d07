"""Text of prompts and decisions: on one line, shortened, and folded for comparison."""

from __future__ import annotations

import re
from typing import Final

from paceline.core.printable import printable_lines
from paceline.core.words import folded as comparable

_DIRECTION: Final = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")  # change the direction of writing
_WORD: Final = re.compile(r"[^\W_]++[+#]*+")  # C++ and C# are not the same
_MIN_REPEATED: Final = 6  # words: shorter texts may repeat themselves


def one_line(text: str) -> str:
    """The text without line ends, runs of blanks and characters that cannot be seen."""
    return " ".join(without_controls(" ".join(text.split())).split())


def without_controls(text: str) -> str:
    """A line without characters that control terminals or change the direction of writing."""
    return _DIRECTION.sub("", printable_lines(text))


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of a line: its beginning and its longer end, where a question usually is."""
    if len(text) <= limit:
        return text
    head = limit // 3
    return f"{text[:head].rsplit(' ', 1)[0]} {text[-(limit - head - 1) :].split(' ', 1)[-1]}"


def beginning(text: str, limit: int) -> str:
    """At most `limit` characters, cut at a blank where there is one."""
    text = text.strip()
    return text if len(text) <= limit else text[: limit + 1].rsplit(maxsplit=1)[0][:limit]


def folded_words(text: str) -> list[str]:
    """Words in lower case, in order."""
    return _WORD.findall(comparable(text))


def folded(text: str) -> str:
    """What two texts that differ in case, blanks and punctuation only have in common. "" for punctuation alone."""
    return " ".join(folded_words(text))


def is_repetitive(text: str) -> bool:
    """True for what a small model writes that has fallen into a loop: most of its words are there before."""
    words = folded_words(text)
    return len(words) >= _MIN_REPEATED and 2 * len(set(words)) < len(words)
