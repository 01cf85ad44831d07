"""Fair shares of a fixed number of places among owners that come and go, and among strangers by their address.

An owner may take a place while it holds fewer than `EASE` times as many as are free. So one that is alone holds eight
ninths of all, and the rest is free for whoever comes next; several that want all they can get hold the same number
each, and one that wants less has what it wants (max-min fairness). Nobody is thrown out: what an owner holds beyond its
share goes to others as it is given back. The rule needs no list of those who wait, and no clock. After Choudhury and
Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches (1998).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Generic, TypeAlias, TypeVar

EASE = 8


class Shares:
    """Places of which each owner holds some; `take` and `give_back` come in pairs."""

    def __init__(self, places: int, *, most: int | None = None) -> None:
        """most: of one owner, whatever is free."""
        self.places = places
        self.taken = 0
        self._most = places if most is None else most
        self._held: dict[str, int] = {}  # owners without any are left out

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def has_room(self, owner: str, *, alone: bool = False) -> bool:
        """True if there is a place for this owner now. alone: nobody else can ever come, so that all places are its."""
        free, held = self.places - self.taken, self.held(owner)
        return free > 0 and held < self._most and (held < EASE * free or alone)

    def take(self, owner: str, *, alone: bool = False) -> bool:
        """Take one place; False if there is none, see `has_room`."""
        if not self.has_room(owner, alone=alone):
            return False
        self.force(owner)
        return True

    def force(self, owner: str) -> None:
        """Count a place that the owner holds in any case, also beyond its share and all places."""
        self._held[owner] = self.held(owner) + 1
        self.taken += 1

    def give_back(self, owner: str) -> None:
        held = self._held.pop(owner) - 1
        assert held >= 0, owner
        if held:
            self._held[owner] = held
        self.taken -= 1

    def check(self) -> None:
        assert sum(self._held.values()) == self.taken and all(held > 0 for held in self._held.values()), self._held


class WaitingLine:
    """Queue for places, first come, first served. Knows no clock: whoever has waited long enough leaves.

    A place is not kept for who is called: somebody else may take it first, and the one called waits again.
    """

    def __init__(self, shares: Shares, most: int) -> None:
        """most: who wait at once."""
        self._shares = shares
        self._most = most
        self._calls: dict[Callable[[], None], tuple[str, bool]] = {}  # of those who wait, in order: owner, alone

    def enter(self, owner: str, call: Callable[[], None], *, alone: bool = False) -> bool:
        """Wait, until `call` is called once; False if too many do. alone: as for `Shares.has_room`."""
        if len(self._calls) >= self._most:
            return False
        self._calls[call] = owner, alone
        return True

    def leave(self, call: Callable[[], None]) -> None:
        """Wait no longer, called or not."""
        self._calls.pop(call, None)

    def give_back(self, owner: str) -> None:
        """Give a place back, and call the first one that it leaves room for."""
        self._shares.give_back(owner)
        for call, (waiting, alone) in self._calls.items():
            if self._shares.has_room(waiting, alone=alone):
                del self._calls[call]
                call()
                return


class Allowances:
    """Amounts of something that owners hold, so much of each at most; an owner's only one may be of any size."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[str, int] = {}  # owners without any are left out

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def take(self, owner: str, amount: int) -> bool:
        """Hold a positive amount more; False if that is too much beside what the owner holds already."""
        assert amount > 0
        if owner in self._held and self._held[owner] + amount > self.most:
            return False
        self._held[owner] = self.held(owner) + amount
        return True

    def give_back(self, owner: str, amount: int) -> None:
        left = self._held.pop(owner) - amount
        assert left >= 0, owner
        if left:
            self._held[owner] = left


# Connections whose sender is not known yet: how many there may be, of one address and in all.
#
# Beyond the limit of its address, the stranger that has been there longest is cut; beyond that of all, the longest
# there of the address that has most of them: an honest sender becomes known at once, or comes from another address
# than the crowd. An IPv6 address counts as its network of 64 bits, since every customer of a provider has at least one
# of those. Knows neither protocols nor sockets.


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
V = TypeVar("V")

_LONGEST = 64  # characters of an address, its zone included


class Strangers(Generic[V]):
    """Visitors that are compared by identity or by value, and counted once each."""

    def __init__(self, per_address: int, in_all: int) -> None:
        self.per_address, self.in_all = per_address, in_all
        self._address_of: dict[V, str | None] = {}
        self._by_address: dict[str | None, dict[V, None]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._address_of)

    def __iter__(self) -> Iterator[V]:
        return iter(self._address_of)

    def come(self, visitor: V, address: str | None) -> list[V]:
        """Count a visitor. Returns those to be cut for it, which do not count any more; it may be among them.

        address: None for one whose address has no limit of its own.
        """
        if visitor in self._address_of and self._address_of[visitor] == address:
            return []
        self.leave(visitor)
        self._address_of[visitor] = address
        same = self._by_address.setdefault(address, {})
        same[visitor] = None
        cut: list[V] = []
        if address is not None and len(same) > self.per_address:
            cut.append(self._leave_oldest(same))
        if len(self) > self.in_all:
            cut.append(self._leave_oldest(max(self._by_address.values(), key=len)))
        return cut

    def leave(self, visitor: V) -> bool:
        """False if it was not counted."""
        if visitor not in self._address_of:
            return False
        address = self._address_of.pop(visitor)
        same = self._by_address[address]
        del same[visitor]
        if not same:
            del self._by_address[address]
        return True

    def _leave_oldest(self, same: dict[V, None]) -> V:
        oldest = next(iter(same))
        self.leave(oldest)
        return oldest

    def check(self) -> None:
        """Assert the invariants."""
        by_address = {visitor for same in self._by_address.values() for visitor in same}
        assert by_address == self._address_of.keys() and all(self._by_address.values())
        assert len(self) <= self.in_all
        assert all(len(same) <= self.per_address for by, same in self._by_address.items() if by is not None)


def counted_address(address: str) -> str:
    """An address, or the network that stands for it; empty for what is none."""
    parsed = parsed_address(address)
    if parsed is not None and parsed.version == 6:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed or "")


def parsed_address(address: str) -> Address | None:
    """None for what is no address. An IPv4 address in IPv6 is that IPv4 address; a zone is left out."""
    return _parsed(address.partition("%")[0]) if len(address) <= _LONGEST else None


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host. Names other than localhost are not looked up and give False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=1024)  # asked several times of each connection, 25 us each
def _parsed(address: str) -> Address | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return parsed.ipv4_mapped or parsed if isinstance(parsed, ipaddress.IPv6Address) else parsed
