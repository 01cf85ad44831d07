"""Heads of distributions in few bytes, decoded bit for bit as the sender has them: ids, and probabilities of the full
distribution, not renormalised; the tail mass is 1 less their sum and is not sent.

With 16 bits a probability, what is decoded equals `core.sampling.dist.quantize`; a precise one is float64, unchanged.
"""

from __future__ import annotations

import numpy as np

from paceline.core.sampling.dist import ONE, SLACK, Dist, IdArray, check, from_codes, quantized_codes
from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import DistPayload
from paceline.wire.payloads import from_varints, to_varints

_CODE_BYTES, _PRECISE_BYTES = 2, 8


def encode_head(dist: Dist, precise: bool) -> DistPayload:
    """Encode; `precise`: in float64. Raises ValueError for an invalid one.

    With 16 bits, ids less likely than 2**-31 are dropped; the heads that aggregators make have none.
    """
    if precise:
        check(dist.probs)
        ids, probs = dist.ids, np.minimum(dist.probs, 1.0).astype("<f8").tobytes()
    else:
        ids, codes = quantized_codes(dist, 1.0, None)
        probs = codes.astype("<u2").tobytes()
    steps = np.diff(ids.astype(np.int64), prepend=-1) - 1
    return DistPayload(to_varints(steps.astype(np.uint64)), probs)


def decode_head(payload: DistPayload, vocab_size: int | None = None) -> Dist:
    """Decode. Raises RemoteProtocolError for anything `encode_head` cannot have written for that vocabulary size."""
    count = int(np.count_nonzero(np.frombuffer(payload.ids, dtype=np.uint8) < 128))
    if count and len(payload.probs) == _PRECISE_BYTES * count:
        probs = np.frombuffer(payload.probs, dtype="<f8").astype(np.float64)
        if not (probs.min() >= 0.0 and probs.max() <= 1.0 and float(probs.sum()) <= 1.0 + SLACK):  # also refuses NaN
            raise _bad("what should be a distribution is none")
        return Dist(_ids(payload.ids, count, vocab_size), probs, max(0.0, 1.0 - float(probs.sum())))
    if len(payload.probs) % _CODE_BYTES:
        raise _bad("probabilities end within a number")
    codes = np.frombuffer(payload.probs, dtype="<u2").astype(np.uint16)
    if len(codes) and codes.max() > ONE:
        raise _bad("a probability is above 1")
    dist = from_codes(_ids(payload.ids, len(codes), vocab_size), codes)
    if dist.tail < 0:
        raise _bad(f"a distribution has mass {1 - dist.tail}")
    return dist


def _ids(data: bytes, count: int, vocab_size: int | None) -> IdArray:
    steps = from_varints(data)
    if len(steps) != count:
        raise _bad(f"a distribution has {len(steps)} ids and {count} probabilities")
    ids = np.cumsum(steps + 1) - 1  # at most 2**20 steps, each below 2**35: no overflow
    if len(ids) and ids[-1] >= (2**31 if vocab_size is None else vocab_size):
        raise _bad("a distribution has a token id outside the vocabulary")
    return ids.astype(np.int32)


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
