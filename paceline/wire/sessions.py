"""Open sessions of a connection and allocation of their numbers.

Numbers are even on the cloud, odd on the device, and increase: a number above the highest was never opened, one below
it that is not open has ended or was left out. Ended sessions take no memory.

A new number is above all that this side has seen, its own and the peer's (Lamport 1978). So both sides agree in which
order sessions came, and serve them in that order where they compete: see `core.batching.groups`.
"""

from __future__ import annotations

from paceline.errors import LinkError, LocalProtocolError, RemoteProtocolError
from paceline.wire.close_codes import CloseCode

MAX_SESSIONS = 256  # open at once, of each opener
MAX_SKIPPED = 1 << 20  # numbers that an opener may leave out at once: else its peer would soon have none left


class SessionTable:
    """own_parity: parity of the numbers this side allocates."""

    def __init__(self, own_parity: int) -> None:
        self._own_parity = own_parity
        self._open: set[int] = set()
        self._highest = {0: -2, 1: -1}  # by parity
        self._allocated = self._highest[own_parity]

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session: int) -> bool:
        return session in self._open

    def allocate(self) -> int:
        """Allocate a number of this side. Sessions must be opened in the order of their numbers."""
        seen = max(self._allocated, *self._highest.values())
        self._allocated = seen + 1 + (seen + 1 - self._own_parity) % 2
        return self._allocated

    def open_own(self, session: int) -> None:
        """Open a session of this side. Raises LocalProtocolError for a number that is not this side's or not new,
        LinkError when too many are open."""
        if session % 2 != self._own_parity or session <= self._highest[self._own_parity]:
            raise LocalProtocolError(f"session {session} cannot be opened: take the numbers in order")
        if self._count(self._own_parity) >= MAX_SESSIONS:
            raise LinkError(f"{MAX_SESSIONS} sessions are open on this link already")
        self._highest[self._own_parity] = session
        self._allocated = max(session, self._allocated)
        self._open.add(session)

    def open_by_peer(self, session: int, *, refuse: bool) -> str | None:
        """Open a session of the peer; the reason if it is refused. Raises RemoteProtocolError for a number that is not
        the peer's, not new, or far from all before."""
        parity = 1 - self._own_parity
        if session % 2 != parity or session <= self._highest[parity]:
            raise RemoteProtocolError(f"session {session} opened again or by the wrong side", close_code=_CODE)
        if session > max(self._allocated, *self._highest.values()) + MAX_SKIPPED:
            raise RemoteProtocolError(f"session {session} leaves out too many numbers", close_code=_CODE)
        self._highest[parity] = session
        if refuse:
            return "one side is going away"
        if self._count(parity) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open on this link already"
        self._open.add(session)
        return None

    def close(self, session: int) -> None:
        self._open.discard(session)

    def sendable(self, session: int) -> bool:
        """True if the session is open; False: it has ended. Raises LocalProtocolError if it was never opened."""
        if not self._known(session):
            raise LocalProtocolError(f"session {session} was never opened")
        return session in self._open

    def receivable(self, session: int) -> bool:
        """True if the session is open; False: it has ended. Raises RemoteProtocolError if it was never opened."""
        if not self._known(session):
            raise RemoteProtocolError(f"session {session} was never opened", close_code=_CODE)
        return session in self._open

    def _known(self, session: int) -> bool:
        return session <= self._highest[session % 2]

    def _count(self, parity: int) -> int:
        return sum(session % 2 == parity for session in self._open)


_CODE = CloseCode.BAD_SESSION
