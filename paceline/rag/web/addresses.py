"""Which IP addresses are public: unicast, and reachable by anyone on the Internet. Pure.

The tables are those of IANA's registries of special-purpose addresses (RFC 6890), written down here because Python's
`is_global` differs between releases, and calls multicast, NAT64 and 6to4 global. IPv6 is public only within 2000::/3,
the part that is assigned for global unicast, so whatever is assigned later is refused until it is added here.
"""

from __future__ import annotations

import ipaddress

from paceline.core.strangers import Address

_SPECIAL_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private, as are 172.16.0.0/12 and 192.168.0.0/16
        "100.64.0.0/10",  # of providers (CGNAT); some clouds' metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # public by its number, and on each machine of Azure the platform's own service
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocols; Oracle's metadata
        "192.0.2.0/24",  # documentation, as are 198.51.100.0/24 and 203.0.113.0/24
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocols, among them Teredo, which contains IPv4 addresses
        "2001:db8::/32",  # documentation, as is 3fff::/20
        "2002::/16",  # 6to4, which contains IPv4 addresses
        "3fff::/20",
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are the IPv4 address that is reached


def is_public(address: Address) -> bool:
    """True if the address is public. Of NAT64, where resolvers give it for names that have IPv4 only, if that is.

    Not known: a network's own NAT64 prefix, and which public addresses are this machine's or its neighbours'.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _UNICAST_V6 and not any(address in network for network in _SPECIAL_V6)
