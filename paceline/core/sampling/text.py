"""Incremental detokenization, and stop strings across token boundaries.

Detokenization works on the bytes of each token, because the bytes of a character may be spread over tokens. Knows no
tokenizer. Not handled: grapheme clusters, whose code points may be split between two pieces of text. The answer matches
before the stop string that is completed first; of several completed at the same character, before the longest. The
division of the text into pieces makes no difference.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Incremental text of a stream of tokens. The joined pieces equal the joined bytes decoded as UTF-8.

    Bytes that can never become a character (RFC 3629) give U+FFFD as soon as that is certain; an unfinished character
    is held back, and dropped at the end.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """End the answer and reset. Always empty: only an unfinished character can be held back."""
        self._decoder.reset()
        return ""


class StopStrings:
    """Stop string search that holds back any suffix which may begin one. Raises ValueError for an empty stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = ""  # the stop string that was found

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """(text that is safe to send, whether a stop string has been found). No text is returned after it. may_end:
        False for text that completes none, whatever it says."""
        if self.found:
            return "", True
        before, text = len(self._held), self._held + text
        matches = [
            (at + len(stop), at)
            for stop in (self._stops if may_end else ())
            if (at := text.find(stop, max(before - len(stop) + 1, 0))) >= 0
        ]
        if matches:
            end, at = min(matches)
            self.found, self._held = text[at:end], ""
            return text[:at], True
        keep = self._held_back_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _held_back_length(self, text: str) -> int:
        """Length of the longest suffix that is a prefix of a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
