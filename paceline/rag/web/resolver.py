"""Addresses of names, as this machine's resolver gives them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]  # (host, port) -> addresses; none for an unknown name


class SystemResolver:
    """In threads of its own: a look-up cannot be cancelled, and strangers' name servers may be slow for half a minute,
    in which others of the program's threads must not be missing.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "paceline-resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """In the order in which they should be tried."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, _addresses, host, port)


def _addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]
