"""Bytes that one answer has sent to the other side, by kind of message, for its stats and the log."""

from __future__ import annotations

from collections import Counter

from paceline.wire.messages import SessionFrame


class Egress:
    """Bytes of the messages of one answer on one side. Overhead of the connection is not counted."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._sessions: set[int] = set()

    def sent(self, message: SessionFrame, num_bytes: int) -> None:
        """Count a message. num_bytes: 0 if it was not sent."""
        if num_bytes:
            self._bytes[message.kind] += num_bytes
            self._sessions.add(message.session)

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def told(self, trace: str) -> str:
        """For the log, with the id of the client's request."""
        return f"{self}{f' ({trace})' if trace else ''}"

    def __str__(self) -> str:
        sessions = ", ".join(map(str, sorted(self._sessions)))
        return f"session {sessions}: " + ", ".join(f"{kind} {size} bytes" for kind, size in sorted(self._bytes.items()))

    def kinds(self) -> dict[str, int]:
        """Bytes by kind of message."""
        return dict(sorted(self._bytes.items()))

    def stats(self) -> dict[str, float]:
        """Entries of an answer's stats."""
        return {f"sent_{kind}_bytes": float(size) for kind, size in sorted(self._bytes.items())}
