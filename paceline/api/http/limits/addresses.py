"""The address behind a connection or a request, as limits by address count it.

Behind a reverse proxy all connections have the proxy's address. Only where it is named as trusted is its header
`X-Forwarded-For` believed: anyone can send one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from paceline.core.strangers import counted_address, parsed_address

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
