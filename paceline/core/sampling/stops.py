"""Stop strings across token and chunk borders: what may be sent, and where the answer ends.

Knows text only. The answer ends before the stop string that is complete first; of several that are complete at the
same character, before the longest. How the text is cut into pieces makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence


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
