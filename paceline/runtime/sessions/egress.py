"""What one answer has sent to the other side: counted where it is sent, by kind of message, and logged at its end."""

from __future__ import annotations

from collections import Counter

from paceline.wire.messages import (
    CloseSession,
    DetailRequest,
    Drafts,
    EvidenceWeight,
    Handover,
    OpenSession,
    RetrievedPassages,
    SessionMessage,
    SpeedReport,
    SyncState,
    Targets,
)

KINDS: dict[type, str] = {  # as reports and logs name them
    OpenSession: "open",
    CloseSession: "close",
    RetrievedPassages: "found",
    Drafts: "drafts",
    EvidenceWeight: "weight",
    DetailRequest: "wanted",
    Targets: "targets",
    Handover: "handover",
    SpeedReport: "pace",
    SyncState: "have",
}


class Egress:
    """Of one answer, at one side. Bytes of messages; what the connection adds is not counted."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._sessions: set[int] = set()

    def sent(self, message: OpenSession | CloseSession | RetrievedPassages | SessionMessage, num_bytes: int) -> None:
        """num_bytes: 0 if it was not sent after all."""
        if num_bytes:
            self._bytes[KINDS[type(message)]] += num_bytes
            self._sessions.add(message.session)

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def __str__(self) -> str:
        sessions = ", ".join(map(str, sorted(self._sessions)))
        return f"session {sessions}: " + ", ".join(f"{kind} {size} bytes" for kind, size in sorted(self._bytes.items()))

    def stats(self) -> dict[str, float]:
        """For an answer's report."""
        return {f"sent_{kind}_bytes": float(size) for kind, size in sorted(self._bytes.items())}
