"""Token ids as LEB128 varints: seven bits a byte, lowest first, the high bit set on all but the last byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode

_MAX_BYTES = 5  # of one number
MAX_NUMBER = 1 << 7 * _MAX_BYTES
_FEW = 128  # ids to write, or bytes to read, for which a loop takes less time than numpy's calls
_UNTERMINATED = "token ids end within a number"
_TOO_LONG = "a token id is written in more bytes than it needs"


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids in their order."""
    return to_varints(np.array(tokens, dtype=np.uint64))


def decode_tokens(data: bytes) -> list[int]:
    """Inverse of `encode_tokens`. Raises RemoteProtocolError as `from_varints` does."""
    return [int(token) for token in from_varints(data)]


def to_varints(values: NDArray[np.uint64]) -> bytes:
    """Values below 2**35."""
    if len(values) <= _FEW:
        return _few_to_bytes(values.tolist())
    sizes = np.ones(len(values), dtype=np.int64)
    for size in range(1, _MAX_BYTES):
        sizes += values >= 1 << 7 * size
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), dtype=np.uint8)
    for place in range(int(sizes.max(initial=0))):
        longer = sizes > place
        more = np.where(sizes[longer] > place + 1, np.uint64(128), np.uint64(0))
        out[starts[longer] + place] = (values[longer] >> np.uint64(7 * place) & np.uint64(127)) | more
    return out.tobytes()


def _few_to_bytes(values: list[int]) -> bytes:
    out = bytearray()
    for value in values:
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


def from_varints(data: bytes) -> NDArray[np.int64]:
    """Inverse of `to_varints`. Raises RemoteProtocolError for numbers cut off, not shortest, or beyond 2**35."""
    if len(data) <= _FEW:
        return np.array(_few_from_bytes(data), dtype=np.int64)
    raw = np.frombuffer(data, dtype=np.uint8)
    (last_bytes,) = np.nonzero(raw < 128)
    if len(last_bytes) == 0 or last_bytes[-1] != len(raw) - 1:
        raise _bad(_UNTERMINATED)
    starts = np.concatenate(([0], last_bytes[:-1] + 1))
    sizes = last_bytes - starts + 1
    if sizes.max() > _MAX_BYTES or np.any((sizes > 1) & (raw[last_bytes] == 0)):
        raise _bad(_TOO_LONG)
    places = np.arange(len(raw)) - np.repeat(starts, sizes)
    return np.add.reduceat((raw & 127).astype(np.int64) << 7 * places, starts)


def _few_from_bytes(data: bytes) -> list[int]:
    if data and data[-1] > 127:
        raise _bad(_UNTERMINATED)
    values: list[int] = []
    value = size = 0
    for byte in data:
        value |= (byte & 127) << 7 * size
        size += 1
        if byte > 127:
            continue
        if size > _MAX_BYTES or (size > 1 and byte == 0):
            raise _bad(_TOO_LONG)
        values.append(value)
        value = size = 0
    return values


def write_number(value: int) -> bytes:
    """One number below `MAX_NUMBER`."""
    return _few_to_bytes([value])


def read_number(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, below `MAX_NUMBER`, and where what follows it begins. Raises RemoteProtocolError as
    `from_varints` does."""
    end = at
    while end < len(data) and data[end] > 127:
        end += 1
    if end >= len(data):
        raise _bad(_UNTERMINATED)
    if end - at >= _MAX_BYTES or (end > at and data[end] == 0):
        raise _bad(_TOO_LONG)
    value = 0
    for byte in reversed(data[at : end + 1]):
        value = value << 7 | byte & 127
    return value, end + 1


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
