"""Distributions quantized to 16 bits per probability, before a token is drawn from them and they are sent.

Verification is exact only under the distribution that the token was drawn from, so the sender rounds first and draws
then. Probabilities are not renormalised (7.3 of the specification): a code is a window of the float64's own bits, 5 of
the exponent and 11 of the mantissa, truncated below, so that no platform's exp or log affects the rounding. Quantized
probabilities are multiples of 2**-42, whose sums are exact in any order; the tail is what they lack of 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist, IdArray, IndexArray, ProbArray

MANTISSA_BITS = 11  # relative step 2**-11: 0.05 %
LOWEST_EXPONENT = -31  # 2**-31 is 4.7e-10; smaller probabilities move to the tail
ONE = -LOWEST_EXPONENT << MANTISSA_BITS  # the code of probability 1, the largest
# The least probability that is never lost: two steps of the grid.
MIN_CODED_PROB = 2.0**LOWEST_EXPONENT * (1.0 + 2.0**-MANTISSA_BITS)
# Relative error: the true probability exceeds the quantized one by at most this share of it. The truncated bits and the
# step down that `quantized_codes` may take are together 2**-10 at most; the rest is for the rounding of products, and
# for probabilities that an engine has computed in float32.
ROUNDING = 2.0**-10 * 1.03
_SHIFT = 52 - MANTISSA_BITS
_BIAS = (1023 + LOWEST_EXPONENT) << MANTISSA_BITS
# A softmax in float32 over 150,000 tokens may sum to 1 + 1e-5. More is not a distribution.
SLACK = 2.0**-12

Codes = NDArray[np.uint16]


def quantize(dist: Dist, *, top_p: float = 1.0, max_ids: int | None = None) -> Dist:
    """The distribution as a 16-bit payload with the same options carries it. Idempotent; sums to exactly 1 with its
    tail.

    Keeps the fewest most likely ids whose mass reaches `top_p`, at most `max_ids`; among equals the lower id. The tail
    is what the kept probabilities lack of 1, rounding included, independent of `dist.tail`.
    Raises ValueError if `dist` is not a distribution.
    """
    ids, codes = quantized_codes(dist, top_p, max_ids)
    return from_codes(ids, codes)


def from_codes(ids: IdArray, codes: Codes) -> Dist:
    """Decode. ids: ascending. The tail is negative if the codes are not those of a distribution."""
    probs = _probs(codes)
    return Dist(ids=ids, probs=probs, tail=1.0 - float(probs.sum()))  # exact: see the module's docstring


def quantized_codes(dist: Dist, top_p: float, max_ids: int | None) -> tuple[IdArray, Codes]:
    """(kept,) ids, ascending, and their codes. See `quantize`."""
    probs = np.ascontiguousarray(dist.probs, dtype=np.float64)
    check(probs)
    codes = (np.minimum(probs, 1.0).view(np.int64) >> _SHIFT) - _BIAS
    if float(_probs(np.maximum(codes, 0).astype(np.uint16))[codes >= 0].sum()) > 1.0:
        codes -= 1  # the mass exceeds 1 by more than the truncation removed: lower every probability by one step
    (places,) = np.nonzero(codes >= 0)
    places = places[_most_likely(codes[places].astype(np.uint16), top_p, max_ids)]
    return dist.ids[places].astype(np.int32), codes[places].astype(np.uint16)


def check(probs: ProbArray) -> None:
    """Raise ValueError if these cannot be (a part of) a distribution."""
    total = float(probs.sum())
    if not (total <= 1.0 + SLACK and (len(probs) == 0 or probs.min() >= 0.0)):  # also refuses NaN
        raise ValueError(f"not a distribution: mass {total}, least probability {probs.min(initial=0.0)}")


def _probs(codes: Codes) -> ProbArray:
    return ((codes.astype(np.int64) + _BIAS) << _SHIFT).view(np.float64)


def _most_likely(codes: Codes, top_p: float, max_ids: int | None) -> IndexArray:
    """(kept,) ascending indices of the fewest largest codes that reach `top_p`."""
    count = len(codes)
    limit = count if max_ids is None else min(max_ids, count)
    if limit == count and top_p >= 1.0:
        return np.arange(count)
    places = np.arange(count)
    if limit < count:  # only the largest need sorting; the stable sort cuts ties with the last of them
        places = np.flatnonzero(codes >= np.partition(codes, count - limit)[count - limit])
    order = places[np.argsort(-codes[places].astype(np.int32), kind="stable")][:limit]
    reached = np.cumsum(_probs(codes[order]))
    enough = int(np.searchsorted(reached, top_p)) + 1  # exact sums: the same cut on every platform
    return np.sort(order[:enough])
