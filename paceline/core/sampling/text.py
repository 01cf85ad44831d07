"""Text of an answer's tokens: incremental detokenization, and stop strings across token borders.

Detokenization works on the bytes a token stands for, because a character's bytes may be spread over tokens. It knows no
tokenizer, and nothing of characters that are joined from several code points: these may come apart between two pieces
of text. An answer ends before the stop string that is complete first; of several that are complete at the same
character, before the longest. How the text is cut into pieces makes no difference.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Text of a stream of tokens. Joined, the pieces are the bytes decoded as UTF-8 in one go.

    Bytes that can never become a character (RFC 3629) give U+FFFD as soon as that is certain; a character that is
    merely unfinished is held back, and dropped at the end.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became complete with this token; often empty."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """At the end of the answer: always empty, since what is held is half a character. Ready to begin anew."""
        self._decoder.reset()
        return ""


class StopStrings:
    """Holds back any tail that may begin a stop string. Raises ValueError for an empty stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._found = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to send, was a stop string found). After it was found: nothing more is."""
        if self._found:
            return "", True
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._found, self._held = True, ""
            return text[: min(ends)[1]], True
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """At the end of the answer: what was held back after all."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
