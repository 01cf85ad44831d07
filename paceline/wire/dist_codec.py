"""Truncated distributions in few bytes, decoded bit for bit as the sender quantized them.

A payload with 16 bits a probability carries the result of `core.sampling.dist.quantize` without loss:
`decode_dist(encode_dist(d))` equals `quantize(d)` bit for bit. A precise payload carries float64 unchanged.
In both, probabilities are those of the full distribution, not renormalised; the tail mass is 1 less their sum and is
not sent.
"""

from __future__ import annotations

import numpy as np

from paceline.core.sampling.dist import ONE, SLACK, Codes, Dist, IdArray, check, from_codes, quantized_codes
from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import DistPayload
from paceline.wire.payloads import from_varints, to_varints

_CODE_BYTES, _PRECISE_BYTES = 2, 8


def encode_dist(dist: Dist, *, top_p: float = 1.0, max_ids: int | None = None) -> DistPayload:
    """Quantize and encode; a quantized distribution is encoded without loss. Raises ValueError for an invalid one."""
    ids, codes = quantized_codes(dist, top_p, max_ids)
    return DistPayload(ids=_id_bytes(ids), probs=codes.astype("<u2").tobytes())


def decode_dist(payload: DistPayload, vocab_size: int | None = None) -> Dist:
    """Decode. Raises RemoteProtocolError for anything `encode_dist` cannot have written for that vocabulary size."""
    codes = _codes(payload.probs)
    dist = from_codes(_ids(payload.ids, len(codes), vocab_size), codes)
    if dist.tail < 0:
        raise _bad(f"a distribution has mass {1 - dist.tail}")
    return dist


def encode_head(dist: Dist, precise: bool) -> DistPayload:
    """Encode the head of a distribution; `precise`: in float64. Raises ValueError for an invalid one.

    With 16 bits, ids less likely than 2**-31 are dropped; the heads that aggregators make have none.
    """
    if not precise:
        return encode_dist(dist)
    check(dist.probs)
    probs = np.minimum(dist.probs, 1.0)
    return DistPayload(ids=_id_bytes(dist.ids), probs=probs.astype("<f8").tobytes())


def decode_head(payload: DistPayload, vocab_size: int | None = None) -> Dist:
    """Decode. Raises RemoteProtocolError for anything `encode_head` cannot have written for that vocabulary size."""
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
    return to_varints(steps.astype(np.uint64))


def _ids(data: bytes, count: int, vocab_size: int | None) -> IdArray:
    steps = from_varints(data)
    if len(steps) != count:
        raise _bad(f"a distribution has {len(steps)} ids and {count} probabilities")
    ids = np.cumsum(steps + 1) - 1  # at most 2**20 steps, each below 2**35: no overflow
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


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
