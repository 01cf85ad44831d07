"""What one answer has sent to the other side: counted where it is sent, by kind of message, and logged at its end."""

from __future__ import annotations

from collections import Counter

from paceline.wire.messages import CloseSession, Found, OpenSession, SessionMessage

_NAMES: dict[type, str] = {OpenSession: "open", CloseSession: "close"}  # others go by their own


class Egress:
    """Of one answer, at one side."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()  # by kind, frames' own included

    def sent(self, message: OpenSession | CloseSession | Found | SessionMessage, num_bytes: int) -> None:
        """num_bytes: 0 if it was not sent after all."""
        if num_bytes:
            self._bytes[_NAMES.get(type(message)) or type(message).__name__.lower()] += num_bytes

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def __str__(self) -> str:
        return ", ".join(f"{kind} {num_bytes} bytes" for kind, num_bytes in sorted(self._bytes.items()))

    def stats(self) -> dict[str, float]:
        """For an answer's report."""
        return {f"sent_{kind}_bytes": float(num_bytes) for kind, num_bytes in sorted(self._bytes.items())}
