"""What a verifier is sent of the distribution of a draft: its probability, or all of it; both exactly.

Of a distribution on the grid of `core.verification.draft_dist`: a probability is a number of points less 1 in 16 bits;
a distribution is varints, first the steps of its ascending ids, then each one's points less 1.
"""

from __future__ import annotations

import numpy as np

from paceline.core.sampling.dist import Dist
from paceline.core.verification import POINTS, counts_of
from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads.varints import from_varints, to_varints

PROB_BYTES = 2


def encode_prob(prob: float) -> bytes:
    """prob: above 0, of a distribution on the grid."""
    return (int(prob * POINTS) - 1).to_bytes(PROB_BYTES, "little")


def decode_probs(data: bytes) -> list[float]:
    """Inverse, for several. data: a multiple of `PROB_BYTES`."""
    return [(int(code) + 1) / POINTS for code in np.frombuffer(data, dtype="<u2")]


def encode_draft_dist(dist: Dist) -> bytes:
    steps = np.diff(dist.ids.astype(np.int64), prepend=-1) - 1
    return to_varints(np.concatenate((steps, counts_of(dist) - 1)).astype(np.uint64))


def decode_draft_dist(data: bytes, vocab_size: int) -> Dist:
    """Inverse. Raises RemoteProtocolError for anything `encode_draft_dist` cannot have written for this vocabulary."""
    numbers = from_varints(data)
    half = len(numbers) // 2
    steps, counts = numbers[:half], numbers[half:] + 1
    if half == 0 or len(counts) != half or int(counts.max()) > POINTS or int(counts.sum()) != POINTS:
        raise _bad("what should be the distribution of a draft is none")
    ids = np.cumsum(steps + 1) - 1  # at most `POINTS` steps, each below 2**35: no overflow
    if int(ids[-1]) >= vocab_size:
        raise _bad("the distribution of a draft has a token id outside the vocabulary")
    return Dist(ids.astype(np.int32), counts / POINTS)


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
