"""Distributions one after another, as the short form of `Drafts` carries them: for each the ids and the probabilities
of `wire.dist_codec`, before either the number of its bytes."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads.varints import read_number, write_number


def pack_dists(dists: Sequence[tuple[bytes, bytes]]) -> bytes:
    """dists: ids and probabilities of each."""
    return b"".join(write_number(len(part)) + part for dist in dists for part in dist)


def unpack_dists(data: bytes) -> list[tuple[bytes, bytes]]:
    """Inverse of `pack_dists`; what the parts hold is not checked. Raises RemoteProtocolError for anything else."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        length, at = read_number(data, at)
        parts.append(data[at : at + length])
        at += length
    if at > len(data) or len(parts) % 2 or not parts:
        raise RemoteProtocolError("distributions end too early", close_code=CloseCode.BAD_FRAME)
    return list(zip(parts[::2], parts[1::2], strict=True))
