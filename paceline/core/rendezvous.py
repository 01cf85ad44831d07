"""Choice of a server for a conversation: the same at each server, and another for few when a server comes or goes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection


def chosen(servers: Collection[str], owner: str, conversation: str) -> str:
    """The server with the highest score (Thaler and Ravishankar, rendezvous hashing, 1998). servers: at least one."""

    def score(server: str) -> bytes:
        return hashlib.sha256("\0".join((server, owner, conversation)).encode("utf-8", "surrogatepass")).digest()

    return max(servers, key=score)
