"""Rows of numbers to bytes and back: hidden rows between stages, scores on their way to the head.

bfloat16 keeps the upper half of a float32, rounded to the nearest, of two equally near ones to the even one: numbers
that a model has computed in bfloat16 survive unchanged. Little-endian. Not checked: whether numbers are finite.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode

RowFormat = Literal["bfloat16", "float16", "float32"]
ROW_FORMATS: tuple[RowFormat, ...] = ("bfloat16", "float16", "float32")
HiddenArray = NDArray[np.float32]

ITEM_BYTES: dict[RowFormat, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_MAX_FLOAT16 = 65_504.0


def pack_rows(rows: HiddenArray, format: RowFormat) -> bytes:
    """rows: (n, width). In float16, what is larger than its greatest number becomes that number."""
    if format == "float32":
        return rows.astype("<f4", copy=False).tobytes()
    if format == "float16":
        return np.clip(rows, -_MAX_FLOAT16, _MAX_FLOAT16).astype("<f2").tobytes()
    bits = np.ascontiguousarray(rows, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # rounding could turn its bits into another number's
    return np.where(is_nan, 0x7FC0, rounded).astype("<u2").tobytes()


def unpack_rows(data: bytes | bytearray | memoryview, format: RowFormat, num_rows: int, width: int) -> HiddenArray:
    """(num_rows, width). Raises RemoteProtocolError if these are not as many bytes as the shape takes."""
    if len(data) != num_rows * width * ITEM_BYTES[format]:
        what = f"{len(data)} bytes for {num_rows} rows of {width} numbers in {format}"
        raise RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
    if format == "bfloat16":
        found: HiddenArray = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.frombuffer(data, "<f4" if format == "float32" else "<f2").astype(np.float32)
    return found.reshape(num_rows, width)
