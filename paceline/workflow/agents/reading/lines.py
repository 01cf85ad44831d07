"""Lines out of pieces of text, without what a model thinks aloud between <think> and </think>."""

from __future__ import annotations

import re
from typing import Final

LINE_ENDS: Final = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")  # those of str.splitlines
_TAG: Final = re.compile(r"<(/?)think(?:ing)?>\Z", re.I | re.A)
_LONGEST_TAG: Final = len("</thinking>")


class LineReader:
    """Cuts text into lines that are not blank. A line over the limit of characters is nonsense, and is left out."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._line: list[str] = []
        self._too_long = False
        self._tail = ""  # the last characters, also of a line that is too long: a tag may end there
        self._thinking = False

    def feed(self, piece: str) -> list[str]:
        """Lines that end in this piece."""
        found: list[str] = []
        for character in piece:
            if character in LINE_ENDS:
                found += self.end()
                continue
            if len(self._line) < self._max_chars + _LONGEST_TAG:
                self._line.append(character)
            else:
                self._too_long = True
            self._tail = self._tail[1 - _LONGEST_TAG :] + character
            if character == ">" and (tag := _TAG.search(self._tail)):
                found += self._at_tag(len(tag[0]), closing=bool(tag[1]))
        return found

    def end(self) -> list[str]:
        """The line that is under way, if it is one."""
        line = "".join(self._line)
        wanted = not (self._thinking or self._too_long or len(line) > self._max_chars) and line.strip()
        self._line, self._too_long, self._tail = [], False, ""
        return [line] if wanted else []

    def _at_tag(self, length: int, *, closing: bool) -> list[str]:
        if closing:  # what comes before it was thought, whether or not the text says where that began
            self._thinking = True
        else:
            del self._line[-length:]
        found = self.end()
        self._thinking = not closing
        return found
