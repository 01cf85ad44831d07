"""Decided tokens with their lanes, a number each: the short form of `Targets`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads.varints import from_varints, to_varints

_LANE_BITS = 2


def pack_targets(tokens: Sequence[int], lanes: bytes) -> bytes:
    """A LEB128 number for each token: the token times 4, plus its lane and 1 where there are lanes. lanes: one for each
    token, at most 2, or none."""
    values = np.array(tokens, np.uint64) << np.uint64(_LANE_BITS)
    return to_varints(values + np.frombuffer(lanes, np.uint8).astype(np.uint64) + np.uint64(1) if lanes else values)


def unpack_targets(data: bytes) -> tuple[list[int], bytes]:
    """Tokens and lanes. Raises RemoteProtocolError for what `pack_targets` does not write."""
    values = from_varints(data)
    marks = (values & (1 << _LANE_BITS) - 1).astype(np.uint8)
    if marks.any() and not marks.all():
        raise RemoteProtocolError("lanes of some tokens alone", close_code=CloseCode.BAD_FRAME)
    lanes = (marks - 1).tobytes() if marks.any() else b""
    return [int(value) for value in values >> _LANE_BITS], lanes
