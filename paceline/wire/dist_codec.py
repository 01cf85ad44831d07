"""Distributions in few bytes, and exactly the law that was shipped.

A payload of 16 bits a probability carries what `core.sampling.quantize` makes of a law, without loss:
`decode_dist(encode_dist(d))` equals `quantise(d)` bit for bit. A precise one carries the float64 as they are.
In both, probabilities are true, not renormalised; the mass left off is what they lack of 1 and is not sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.quantize import (
    LOWEST_EXPONENT,
    MANTISSA_BITS,
    ONE,
    SLACK,
    Codes,
    check,
    from_codes,
    quantize,
    quantized_codes,
)
from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import DistPayload

__all__ = [
    "LOWEST_EXPONENT",
    "MANTISSA_BITS",
    "ONE",
    "decode_dist",
    "decode_head",
    "encode_dist",
    "encode_head",
    "quantize",
]

_MAX_VARINT_BYTES = 5
_CODE_BYTES, _PRECISE_BYTES = 2, 8


def encode_dist(dist: Dist, *, top_p: float = 1.0, max_ids: int | None = None) -> DistPayload:
    """See `quantise`; what was quantised before is shipped without loss. Raises ValueError for what is no law."""
    ids, codes = quantized_codes(dist, top_p, max_ids)
    return DistPayload(ids=_id_bytes(ids), probs=codes.astype("<u2").tobytes())


def decode_dist(payload: DistPayload, vocab_size: int | None = None) -> Dist:
    """Raises RemoteProtocolError for anything `encode_dist` cannot have made of a vocabulary of that size."""
    codes = _codes(payload.probs)
    dist = from_codes(_ids(payload.ids, len(codes), vocab_size), codes)
    if dist.tail < 0:
        raise _bad(f"a distribution has mass {1 - dist.tail}")
    return dist


def encode_head(dist: Dist, precise: bool) -> DistPayload:
    """A head of a law; `precise`: with float64 probabilities. Raises ValueError for what is no distribution.

    With 16 bits, ids less likely than 2**-31 are dropped; `core.aggregation.registry` makes heads that have none.
    """
    if not precise:
        return encode_dist(dist)
    check(dist.probs)
    probs = np.minimum(dist.probs, 1.0)
    return DistPayload(ids=_id_bytes(dist.ids), probs=probs.astype("<f8").tobytes())


def decode_head(payload: DistPayload, vocab_size: int | None = None) -> Dist:
    """Raises RemoteProtocolError for anything `encode_head` cannot have made of a vocabulary of that size."""
    count = int(np.count_nonzero(np.frombuffer(payload.ids, dtype=np.uint8) < 128))
    if count == 0 or len(payload.probs) != _PRECISE_BYTES * count:
        return decode_dist(payload, vocab_size)
    probs = np.frombuffer(payload.probs, dtype="<f8").astype(np.float64)
    if not (probs.min() >= 0.0 and probs.max() <= 1.0 and float(probs.sum()) <= 1.0 + SLACK):  # also refuses NaN
        raise _bad("what should be a distribution is none")
    ids = _ids(payload.ids, len(probs), vocab_size)
    return Dist(ids, probs, max(0.0, 1.0 - float(probs.sum())))


def _id_bytes(ids: IdArray) -> bytes:
    steps = np.diff(ids.astype(np.int64), prepend=-1) - 1
    return _to_varints(steps.astype(np.uint64))


def _ids(data: bytes, count: int, vocab_size: int | None) -> IdArray:
    steps = _from_varints(data)
    if len(steps) != count:
        raise _bad(f"a distribution has {len(steps)} ids and {count} probabilities")
    ids = np.cumsum(steps + 1) - 1  # at most 2**20 steps below 2**35: no overflow
    if len(ids) and ids[-1] >= (2**31 if vocab_size is None else vocab_size):
        raise _bad("a distribution has a token id outside the vocabulary")
    return ids.astype(np.int32)


def _codes(data: bytes) -> Codes:
    if len(data) % _CODE_BYTES:
        raise _bad("probabilities end within a number")
    codes = np.frombuffer(data, dtype="<u2").astype(np.uint16)
    if len(codes) and codes.max() > ONE:
        raise _bad("a probability is above 1")
    return codes


def _to_varints(values: NDArray[np.uint64]) -> bytes:
    """LEB128: seven bits a byte, the lowest first, the high bit set on all but the last. Values below 2**35."""
    sizes = np.ones(len(values), dtype=np.int64)
    for size in range(1, _MAX_VARINT_BYTES):
        sizes += values >= 1 << 7 * size
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), dtype=np.uint8)
    for place in range(int(sizes.max(initial=0))):
        has = sizes > place
        more = np.where(sizes[has] > place + 1, np.uint64(128), np.uint64(0))
        out[starts[has] + place] = (values[has] >> np.uint64(7 * place) & np.uint64(127)) | more
    return out.tobytes()


def _from_varints(data: bytes) -> NDArray[np.int64]:
    """Refuses what `_to_varints` does not write: a number without end, one longer than need be, one above 2**35."""
    raw = np.frombuffer(data, dtype=np.uint8)
    (ends,) = np.nonzero(raw < 128)
    if len(raw) and (len(ends) == 0 or ends[-1] != len(raw) - 1):
        raise _bad("token ids end within a number")
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    sizes = ends - starts + 1
    if sizes.max(initial=1) > _MAX_VARINT_BYTES or np.any((sizes > 1) & (raw[ends] == 0)):
        raise _bad("a token id is written in more bytes than it needs")
    if not len(raw):
        return np.zeros(0, dtype=np.int64)
    places = np.arange(len(raw)) - np.repeat(starts, sizes)
    return np.add.reduceat((raw & 127).astype(np.int64) << 7 * places, starts)


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
