"""Connections before and after their sender is known: how many strangers there may be, and connections of one key.

A connection belongs to a stranger until a key on it is accepted (any request, where none is required) or a device's
credential. So silent connections, half heads, bodies of open routes and unadmitted WebSockets are counted together,
by address and in all. Beyond the limit of its address, the stranger that has been there longest is cut; beyond that of
all, the longest there of the address that has most of them: an honest sender becomes known at once, or comes from
another address than the crowd. Knows neither HTTP nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.api.http.addresses import Network, client_address, counted, is_trusted
from paceline.core.shares import Shares

STRANGERS_PER_ADDRESS = 512
GRACE_S = 0.25  # until a new connection counts: one whose head is here already is known before


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """`trusted`: reverse proxies whose word on the sender's address is taken."""

    strangers_per_address: int = STRANGERS_PER_ADDRESS
    trusted: tuple[Network, ...] = ()

    def address_of(self, scope: object) -> str:
        """The address that a request counts for, by its ASGI scope."""
        assert isinstance(scope, dict)
        client = scope.get("client")
        return client_address(client[0] if client else "", scope["headers"], self.trusted)


class Visitor:
    """One connection, from its beginning to `gone`. Belongs to the event loop."""

    def __init__(self, doors: Doors, peer: str, abort: Callable[[], None]) -> None:
        """abort: break the connection at once."""
        self.abort = abort
        self.known = False
        # A trusted proxy may open as many connections as it likes before it says for whom.
        self.address = None if is_trusted(peer, doors.limits.trusted) else counted(peer)
        self._doors = doors
        self._owner: str | None = None  # whose share the connection is part of
        self._gone = False

    def linger(self) -> None:
        """Some time has passed: count it if it is still a stranger's."""
        if not self.known and not self._gone:
            self._doors.come(self)

    def speak_for(self, address: str) -> None:
        """A request has come, for this address."""
        if address != self.address:
            counted_before = self._doors.leave(self)
            self.address = address
            if counted_before:
                self._doors.come(self)

    def identify(self, owner: str, *, alone: bool) -> bool:
        """A request of this owner has been accepted. False if it has too many connections; then nothing changes.

        alone: nobody else can come, because no key is required.
        """
        if self._owner != owner and not self._gone:
            if not self._doors.shares.take(owner, alone=alone):
                return False
            self._give_back()
            self._owner = owner
        self.admitted()
        return True

    def admitted(self) -> None:
        """Its sender is known now."""
        self.known = True
        self._doors.leave(self)

    def upgraded(self) -> None:
        """It is a WebSocket from now on, which has to introduce itself, whoever used the connection before."""
        if self.known:
            self.known = False
            self._give_back()
            self._doors.come(self)

    def gone(self) -> None:
        """The connection has ended."""
        self._gone = True
        self._doors.leave(self)
        self._give_back()

    def _give_back(self) -> None:
        if self._owner is not None:
            self._doors.shares.give_back(self._owner)
            self._owner = None


class Doors:
    """All visitors of one server."""

    def __init__(self, limits: DoorLimits, max_connections: int) -> None:
        self.limits = limits
        self.max_strangers = max(1, max_connections // 2)
        self.shares = Shares(max_connections)  # of owners, in connections
        self._strangers: set[Visitor] = set()
        self._by_address: dict[str | None, dict[Visitor, None]] = {}  # the oldest first

    @property
    def num_strangers(self) -> int:
        return len(self._strangers)

    def come(self, visitor: Visitor) -> None:
        """Count a stranger, and cut another if that is one too many."""
        self._strangers.add(visitor)
        same = self._by_address.setdefault(visitor.address, {})
        same[visitor] = None
        if visitor.address is not None and len(same) > self.limits.strangers_per_address:
            self._cut(next(iter(same)))
        if len(self._strangers) > self.max_strangers:
            most = max(self._by_address.values(), key=len)
            self._cut(next(iter(most)))

    def leave(self, visitor: Visitor) -> bool:
        """False if it was not counted."""
        if visitor not in self._strangers:
            return False
        self._strangers.discard(visitor)
        same = self._by_address[visitor.address]
        del same[visitor]
        if not same:
            del self._by_address[visitor.address]
        return True

    def _cut(self, visitor: Visitor) -> None:
        self.leave(visitor)
        visitor.abort()

    def check(self) -> None:
        self.shares.check()
        by_address = {visitor for same in self._by_address.values() for visitor in same}
        assert by_address == self._strangers and all(self._by_address.values())
        assert all(not visitor.known and not visitor._gone for visitor in self._strangers)
