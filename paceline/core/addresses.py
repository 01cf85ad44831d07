"""Addresses of senders, and strangers by them: connections whose sender is not known yet, how many there may be; and
the URL of a database.

Beyond the limit of its address, the stranger that has been there longest is cut; beyond that of all, the longest there
of the address that has most of them: an honest sender becomes known at once, or comes from another address than the
crowd. An IPv6 address counts as its network of 64 bits, since every customer of a provider has at least one of those.
Not one of `fair`'s doors: nobody waits here, and who is cut is chosen by age, since strangers have no shares.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Generic, TypeAlias, TypeVar

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
V = TypeVar("V")

_LONGEST = 64  # characters of an address, its zone included
_HOST = r"(?:\[[0-9A-Fa-f:.]{2,64}\]|(?:[^\s@/?%:,\[\]]|%[0-9A-Fa-f]{2}){0,255}+)(?::[0-9]{1,5})?"
_DATABASE = re.compile(  # so strict that no part of a password is taken for another one, which an error would show
    rf"postgres(?:ql)?://(?:(?:[^\s@/%]|%[0-9A-Fa-f]{{2}})*+@)?(?P<host>{_HOST}(?:,{_HOST}){{0,31}})"
    r"(?:/(?P<name>(?:[^\s@/?%]|%[0-9A-Fa-f]{2})*+))?(?:\?(?:[^\s@%]|%[0-9A-Fa-f]{2})*+)?"
)


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


def database_name(url: str) -> str:
    """A PostgreSQL database as messages name it, without its password. Raises ValueError for any other URL."""
    parts = _DATABASE.fullmatch(url)
    if parts is None:
        raise ValueError(
            "it is to be postgresql://USER:PASSWORD@HOST:PORT/NAME, where @ / % of a password are written %40 %2F %25"
        )
    return f"the database {parts['name'] or 'postgres'} on {parts['host'] or 'this machine'}"


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
