"""KV prefixes as bulk messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.core.batching.block_manager import CARRIERS, KvPrefix
from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.stages.messages import KvRows


def kv_to_wire(request: int, rows: KvPrefix) -> tuple[KvRows, bytes]:
    shapes = [tuple(map(int, array.shape)) for array in (rows.keys, rows.values)]
    header = KvRows(request, rows.dtype, shapes[0], shapes[1])  # type: ignore[arg-type]  # `KvPrefix` has checked them
    return header, rows.keys.tobytes() + rows.values.tobytes()


def kv_from_wire(header: KvRows, payload: bytes | bytearray, model: str, tokens: Sequence[int]) -> KvPrefix:
    """Raises RemoteProtocolError for bytes that are not of these shapes."""
    carrier = CARRIERS.get(header.dtype)
    sizes = [math.prod(shape) for shape in (header.key_shape, header.value_shape)]
    if carrier is None or len(payload) != sum(sizes) * carrier.itemsize:
        raise _bad(f"{len(payload)} bytes for {header.key_shape} and {header.value_shape} of {header.dtype}")
    both = np.frombuffer(payload, carrier)
    keys, values = both[: sizes[0]].reshape(header.key_shape), both[sizes[0] :].reshape(header.value_shape)
    try:
        return KvPrefix(model, header.dtype, tuple(tokens), keys, values)
    except ValueError as error:
        raise _bad(str(error)) from error


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
