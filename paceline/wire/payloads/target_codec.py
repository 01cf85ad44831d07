"""Decided tokens with their lanes, or with who has chosen them, a number each: the short form of `Targets`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads.varints import from_varints, to_varints

# Where a target comes from: it is named itself, or is the choice that one of the sides has sent after its prefix.
NAMED, RECEIVERS, SENDERS = range(3)
_MARK_BITS = 3
_LAST_LANE = 3  # lanes are marked 1 to 3
_FIRST_SOURCE = _LAST_LANE  # a choice of the receiver's is marked 4, of the sender's 5


def are_sources(sources: bytes, tokens: Sequence[int], lanes: bytes) -> bool:
    """They say of these targets which are named: not all are, and those that are not are 0."""
    if len(sources) != len(tokens) or max(sources, default=0) > SENDERS or lanes:
        return False
    known = [token for token, source in zip(tokens, sources, strict=True) if source != NAMED]
    return bool(known) and not any(known)


def pack_targets(tokens: Sequence[int], lanes: bytes, sources: bytes) -> bytes:
    """A LEB128 number for each token: the token times 8, plus a mark. lanes: one for each token, at most 2, or none.
    sources: likewise, and none with lanes; a token that is not named is 0."""
    values = np.array(tokens, np.uint64) << np.uint64(_MARK_BITS)
    if lanes:
        values += np.frombuffer(lanes, np.uint8).astype(np.uint64) + np.uint64(1)
    elif sources:
        marks = np.frombuffer(sources, np.uint8).astype(np.uint64)
        values += np.where(marks > NAMED, marks + np.uint64(_FIRST_SOURCE), np.uint64(0))
    return to_varints(values)


def unpack_targets(data: bytes) -> tuple[list[int], bytes, bytes]:
    """Tokens, lanes and sources. Raises RemoteProtocolError for what `pack_targets` does not write."""
    values = from_varints(data)
    marks = (values & (1 << _MARK_BITS) - 1).astype(np.uint8)
    tokens = values >> _MARK_BITS
    laned, known = (marks > 0) & (marks <= _LAST_LANE), marks > _LAST_LANE
    if laned.any() and not laned.all():
        raise _bad("lanes of some tokens alone")
    if tokens[known].any() or (marks > _FIRST_SOURCE + SENDERS).any():
        raise _bad("a target is named in two ways, or in none")
    lanes = (marks - 1).tobytes() if laned.any() else b""
    sources = np.where(known, marks - _FIRST_SOURCE, NAMED).astype(np.uint8).tobytes() if known.any() else b""
    return [int(token) for token in tokens], lanes, sources


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
