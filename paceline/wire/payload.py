"""Distributions in few bytes, and exactly the law that was shipped.

Verification is exact only under the law a token was really drawn from, so a sender first rounds its distribution
with `quantise`, draws from that, and ships it: `decode_dist(encode_dist(d))` equals `quantise(d)` bit for bit.

Probabilities are true, not renormalised (7.3 of the specification): a window of the float64's own bits, 5 of the
exponent and 11 of the mantissa, cut off below, so that no rounding of a platform's exp or log is involved. They are
multiples of 2**-42, whose sums are exact in any order; the mass left off is what they lack of 1 and is not sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.dist import Dist, IdArray, ProbArray
from paceline.errors import RemoteProtocolError
from paceline.wire.closing import CloseCode
from paceline.wire.messages import DistPayload

MANTISSA_BITS = 11  # relative step 2**-11: 0.05 %
LOWEST_EXPONENT = -31  # 2**-31 is 4.7e-10; what is less likely goes to the tail
ONE = -LOWEST_EXPONENT << MANTISSA_BITS  # the code of probability 1, the largest
_SHIFT = 52 - MANTISSA_BITS
_BIAS = (1023 + LOWEST_EXPONENT) << MANTISSA_BITS
_UNIT = 2.0 ** (LOWEST_EXPONENT - MANTISSA_BITS)
_MAX_VARINT_BYTES = 5
# A softmax in float32 over 150,000 tokens may sum to 1 + 1e-5. More is not a distribution.
_SLACK = 2.0**-12

Codes = NDArray[np.uint16]


def quantise(dist: Dist, *, top_p: float = 1.0, max_ids: int | None = None) -> Dist:
    """The law that `encode_dist` with the same options ships. Idempotent; its probabilities and tail sum to exactly 1.

    Keeps the fewest most likely ids whose mass reaches `top_p`, at most `max_ids`; among equals the lower id. Whatever
    `dist.tail` says, the new tail is what the kept probabilities lack of 1, the rounding included.
    Raises ValueError for what is not a distribution.
    """
    ids, codes = _kept(dist, top_p, max_ids)
    return _dist(ids, codes)


def encode_dist(dist: Dist, *, top_p: float = 1.0, max_ids: int | None = None) -> DistPayload:
    """See `quantise`. What was quantised before is shipped without loss."""
    ids, codes = _kept(dist, top_p, max_ids)
    steps = np.diff(ids.astype(np.int64), prepend=-1) - 1
    return DistPayload(ids=_to_varints(steps.astype(np.uint64)), probs=codes.astype("<u2").tobytes())


def decode_dist(payload: DistPayload, vocab_size: int | None = None) -> Dist:
    """Raises RemoteProtocolError for anything `encode_dist` cannot have made of a vocabulary of that size."""
    steps = _from_varints(payload.ids)
    codes = _codes(payload.probs)
    if len(steps) != len(codes):
        raise _bad(f"a distribution has {len(steps)} ids and {len(codes)} probabilities")
    ids = np.cumsum(steps + 1) - 1  # at most 2**20 steps below 2**35: no overflow
    if len(ids) and ids[-1] >= (2**31 if vocab_size is None else vocab_size):
        raise _bad("a distribution has a token id outside the vocabulary")
    dist = _dist(ids.astype(np.int32), codes)
    if dist.tail < 0:
        raise _bad(f"a distribution has mass {1 - dist.tail}")
    return dist


def _dist(ids: IdArray, codes: Codes) -> Dist:
    probs = _probs(codes)
    return Dist(ids=ids, probs=probs, tail=1.0 - float(probs.sum()))  # exact: see the module's docstring


def _probs(codes: Codes) -> ProbArray:
    return ((codes.astype(np.int64) + _BIAS) << _SHIFT).view(np.float64)


def _kept(dist: Dist, top_p: float, max_ids: int | None) -> tuple[IdArray, Codes]:
    probs = np.ascontiguousarray(dist.probs, dtype=np.float64)
    total = float(probs.sum())
    if not (total <= 1.0 + _SLACK and (len(probs) == 0 or probs.min() >= 0.0)):  # also refuses NaN
        raise ValueError(f"not a distribution: mass {total}, least probability {probs.min(initial=0.0)}")
    codes = (np.minimum(probs, 1.0).view(np.int64) >> _SHIFT) - _BIAS
    if float(_probs(np.maximum(codes, 0).astype(np.uint16))[codes >= 0].sum()) > 1.0:
        codes -= 1  # the mass exceeded 1 by more than the rounding took: every probability goes down one step
    (places,) = np.nonzero(codes >= 0)
    places = places[_most_likely(codes[places].astype(np.uint16), top_p, max_ids)]
    return dist.ids[places].astype(np.int32), codes[places].astype(np.uint16)


def _most_likely(codes: Codes, top_p: float, max_ids: int | None) -> NDArray[np.intp]:
    """(kept,) ascending places of the fewest largest codes that reach `top_p`."""
    count = len(codes)
    limit = count if max_ids is None else min(max_ids, count)
    if limit == count and top_p >= 1.0:
        return np.arange(count)
    places = np.arange(count)
    if limit < count:  # only the largest need sorting; equals of the last of them are cut by the stable sort
        places = np.flatnonzero(codes >= np.partition(codes, count - limit)[count - limit])
    order = places[np.argsort(-codes[places].astype(np.int32), kind="stable")][:limit]
    reached = np.cumsum(_probs(codes[order]))
    enough = int(np.searchsorted(reached, top_p)) + 1  # exact sums: the same cut on every platform
    return np.sort(order[:enough])


def _codes(data: bytes) -> Codes:
    if len(data) % 2:
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
