"""Connections before and after their sender is known: how many strangers there may be, and connections of one key.

A connection belongs to a stranger until a key on it is accepted (any request, where none is required) or a device's
credential. So silent connections, half heads, bodies of open routes and unadmitted WebSockets are counted together,
by address and in all (`core.addresses.Strangers`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from paceline.core.addresses import Strangers, counted_address, parsed_address
from paceline.core.fair import Shares
from paceline.settings_tables import TUNING

# ---- the address behind a connection or a request, as limits by address count it -------------------------------------
# Behind a reverse proxy all connections have the proxy's address. Only where it is named as trusted is its header
# `X-Forwarded-For` believed: anyone can send one.
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_MAX_HOPS = 16  # of proxies one behind the other


def networks(entries: Iterable[str]) -> tuple[Network, ...]:
    """Addresses or networks such as 10.0.0.0/8. Raises ValueError for an invalid one."""
    return tuple(ipaddress.ip_network(entry, strict=False) for entry in entries)


def is_trusted(peer: str, trusted: Sequence[Network]) -> bool:
    address = parsed_address(peer) if trusted else None
    return address is not None and any(address in network for network in trusted)


def client_address(peer: str, headers: Iterable[tuple[bytes, bytes]], trusted: Sequence[Network]) -> str:
    """The address that a request counts for. `peer`: of its connection; empty where it has none."""
    if not is_trusted(peer, trusted):
        return counted_address(peer)
    values = b",".join(value for name, value in headers if name == b"x-forwarded-for")
    hops = values.decode("latin-1").split(",")
    for hop in hops[: -_MAX_HOPS - 1 : -1]:  # each proxy appends the address that it was reached from
        if parsed_address(hop.strip()) is None:
            break
        peer = hop.strip()
        if not is_trusted(peer, trusted):
            break
    return counted_address(peer)


GRACE_S = 0.25  # until a new connection counts: one whose head is here already is known before


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """`trusted`: reverse proxies whose word on the sender's address is taken. Where no key is required: `origins`,
    those let in besides local pages (`admission.is_local_origin`); `every_user`, whether other users of this machine
    are let in, too."""

    strangers_per_address: int = TUNING.strangers_per_address
    trusted: tuple[Network, ...] = ()
    origins: frozenset[str] = frozenset()
    every_user: bool = False

    def address_of(self, scope: object) -> str:
        """The address that a request counts for, by its ASGI scope."""
        assert isinstance(scope, dict)
        client = scope.get("client")
        return client_address(client[0] if client else "", scope["headers"], self.trusted)


class Visitor:
    """One connection, from its beginning to `gone`. Belongs to the event loop."""

    def __init__(
        self, doors: Doors, peer: str, abort: Callable[[], None], own_user: Callable[[], bool] = lambda: True
    ) -> None:
        """abort: break the connection at once. own_user: whether it is of this program's user; asked once at most."""
        self.abort = abort
        self.known = False
        # A trusted proxy may open as many connections as it likes before it says for whom.
        self.address = None if is_trusted(peer, doors.limits.trusted) else counted_address(peer)
        self._is_own_user = own_user
        self._doors = doors
        self._owner: str | None = None  # whose share the connection is part of
        self._gone = False

    @cached_property
    def is_own_user(self) -> bool:
        """The connection comes from the user who runs this program, or from root. For a keyless server."""
        return self._is_own_user()

    def linger(self) -> None:
        """Some time has passed: count it if it is still a stranger's."""
        if not self.known and not self._gone:
            self._come()

    def _come(self) -> None:
        """Count a stranger, and cut another if that is one too many."""
        for each in self._doors.strangers.come(self, self.address):
            each.abort()

    def speak_for(self, address: str) -> None:
        """A request has come, for this address."""
        if address != self.address:
            counted_before = self._doors.strangers.leave(self)
            self.address = address
            if counted_before:
                self._come()

    def identify(self, owner: str) -> bool:
        """A request of this owner has been accepted. False if it has too many connections; then nothing changes."""
        if self._owner != owner and not self._gone:
            if not self._doors.shares.take(owner):
                return False
            self._give_back()
            self._owner = owner
        self.admitted()
        return True

    def admitted(self) -> None:
        """Its sender is known now."""
        self.known = True
        self._doors.strangers.leave(self)

    def upgraded(self) -> None:
        """It is a WebSocket from now on, which has to introduce itself, whoever used the connection before."""
        if self.known:
            self.known = False
            self._give_back()
            self._come()

    def gone(self) -> None:
        self._gone = True
        self._doors.strangers.leave(self)
        self._give_back()

    def _give_back(self) -> None:
        if self._owner is not None:
            self._doors.shares.give_back(self._owner)
            self._owner = None


class Doors:
    def __init__(self, limits: DoorLimits, max_connections: int) -> None:
        self.limits = limits
        self.max_strangers = max(1, max_connections // 2)
        self.shares = Shares(max_connections)  # of owners, in connections
        self.strangers: Strangers[Visitor] = Strangers(limits.strangers_per_address, self.max_strangers)
