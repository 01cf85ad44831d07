"""The user behind a connection from this machine, as the kernel knows it.

A server on a loopback address can be reached by every user of the machine. On Linux the owner of a socket is asked of
`sock_diag` (netlink), which needs no privileges; on other systems, and where netlink is barred, owners are unknown.
"""

from __future__ import annotations

import functools
import os
import socket
import struct

Address = tuple[str, int | None]  # an IP address and a port; without one for a socket that has none

ROOT = 0

_SOCK_DIAG, _BY_FAMILY, _ERROR, _REQUEST = 4, 20, 2, 1  # linux/netlink.h, linux/sock_diag.h
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ASKED = struct.Struct("=BBBBI")  # inet_diag_req_v2: family, protocol, extensions, padding, states
_ID = struct.Struct("!HH16s16s")  # inet_diag_sockid: ports and addresses of both ends
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # of any interface, without a cookie
_OWNER = struct.Struct("=II")  # inet_diag_msg: user, inode
_OWNER_AT = _HEADER.size + 4 + _ID.size + len(_ANY) + 12


def is_own_user(client: Address | None, server: Address | None) -> bool:
    """True if the client's end of a TCP connection belongs to this program's user or to root.

    True also where the system cannot tell (`can_tell`). False for an end whose process has closed it.
    """
    if client is None or server is None or not can_tell():
        return True
    owner = user_of(client, server)
    return owner is not None and owner in _welcome()


@functools.cache
def can_tell() -> bool:
    """True if the owner of a connection can be found here. Tried once, with a connection of this program to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            return user_of(client.getsockname(), client.getpeername()) == os.geteuid()
    except OSError:
        return False


def user_of(near: Address, far: Address) -> int | None:
    """Id of the user whose process holds this end of a TCP connection; None if none does. Raises OSError where the
    kernel does not answer."""
    family = socket.AF_INET6 if ":" in near[0] else socket.AF_INET
    ends = [socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0") for address, _ in (near, far)]
    body = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + _ID.pack(near[1] or 0, far[1] or 0, *ends) + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)  # it answers at once
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body)
        answer = kernel.recv(4096)
    if len(answer) < _OWNER_AT + _OWNER.size or _HEADER.unpack_from(answer)[1] == _ERROR:
        return None
    user, inode = _OWNER.unpack_from(answer, _OWNER_AT)
    return int(user) if inode else None  # without an inode it is closed, and the user says nothing


def _welcome() -> set[int]:
    return {os.geteuid(), ROOT}
