"""Common random numbers: noise as a function of (seed, position, token id), the same on every side.

Stateless: any subset of ids, at any position and in any order of calls, has the same values. The hash is SplitMix64
(Steele, Lea, Flood 2014) started from a key of seed, position and purpose, with the token id as its counter. The values
are part of the wire contract: two sides of different versions must agree on them, so a test pins them. Not for secrets:
the hash is not cryptographic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import IdArray, IndexArray, ProbArray, token_ids

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

# 52 bits plus one half: every u is exact in float64 and strictly between 0 and 1.
_STEP = 2.0**-52
_CHUNK = 8192  # ids per pass of the hash: its arrays fit the CPU cache and need no memory from the system


def gumbel(seed: int, position: int, ids: IdArray) -> NDArray[np.float64]:
    """Standard Gumbel noise, -log(-log(u)). ids: (n,) → (n,). The value of an id does not depend on the other ids."""
    noise = np.empty(len(ids))
    key = _start(seed, position)
    for begin in range(0, len(ids), _CHUNK):
        u = _uniforms(key, ids[begin : begin + _CHUNK])
        np.negative(np.log(u, out=u), out=u)
        np.negative(np.log(u, out=u), out=noise[begin : begin + _CHUNK])
    return noise


def gumbel_of(seed: int, position: int, tokens: Iterable[int]) -> list[float]:
    """`gumbel` for a few tokens, in a third of the time. For drafts only: the logarithm may round differently."""
    key, log, found = _start_of(seed, position), math.log, []
    for token in tokens:
        z = (token * _GAMMA + key) & _MASK  # `_mix`, without the calls
        z = ((z ^ (z >> 30)) * _FIRST) & _MASK
        z = ((z ^ (z >> 27)) * _SECOND) & _MASK
        found.append(-log(-log((((z ^ (z >> 31)) >> 12) + 0.5) * _STEP)))
    return found


def uniform(seed: int, position: int, purpose: str) -> float:
    """A number in (0, 1) for this position and purpose, independent of `gumbel` and of other purposes."""
    bits = _mix((_key(seed, position, purpose) + _GAMMA) & _MASK)
    return ((bits >> 12) + 0.5) * _STEP


def contenders(seed: int, position: int, ids: IdArray, weights: ProbArray, score: float) -> IndexArray:
    """Indices of the ids whose log(weight) + noise may reach `score`: all that do, and a few that do not.

    weights: (n,) >= 0. Costs the hash but no logarithm: noise reaches `score - log(w)` only if
    -log(u) <= w * exp(-score), and 1 - u <= -log(u).
    """
    limit = float(np.exp(min(-score, 600.0))) * (1.0 + 1e-9)  # a little more than rounding; exp(600) is finite
    likely = weights >= _STEP / 2 / limit  # _STEP / 2 is the smallest 1 - u
    if 4 * np.count_nonzero(likely) < len(ids):
        places = np.flatnonzero(likely)
        return places[contenders(seed, position, ids[places], weights[places], score)] if len(places) else places
    reach = weights * limit
    reach += _uniforms_of_all(_start(seed, position), ids)
    return np.flatnonzero(reach >= 1.0)


def _uniforms_of_all(key: np.uint64, ids: IdArray) -> NDArray[np.float64]:
    """Uniform numbers of `ids`. Those of a whole vocabulary are cached: siblings in a tree, and both sides'
    distributions at a position, need the same ones."""
    if len(ids) > _CHUNK and int(ids[-1]) == len(ids) - 1:
        return _whole_row(int(key), len(ids))
    return _in_chunks(key, ids)


@lru_cache(maxsize=12)  # positions, about the depth of a tree: 1.2 MB each with 152,000 ids
def _whole_row(key: int, vocab_size: int) -> NDArray[np.float64]:
    row = _in_chunks(np.uint64(key), token_ids(vocab_size))
    row.flags.writeable = False
    return row


def _in_chunks(key: np.uint64, ids: IdArray) -> NDArray[np.float64]:
    row = np.empty(len(ids))
    for begin in range(0, len(ids), _CHUNK):
        row[begin : begin + _CHUNK] = _uniforms(key, ids[begin : begin + _CHUNK])
    return row


def _uniforms(key: np.uint64, ids: IdArray) -> NDArray[np.float64]:
    """(n,) in (0, 1). The hash relies on uint64 arrays wrapping around, which numpy does without a warning."""
    z = ids.astype(np.uint64)
    z *= np.uint64(_GAMMA)
    z += key
    z ^= z >> np.uint64(30)
    z *= np.uint64(_FIRST)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    z >>= np.uint64(12)
    u = z.view(np.int64).astype(np.float64)  # below 2**52 the signed value is the same, and converts faster
    u += 0.5
    u *= _STEP
    return u


def _start(seed: int, position: int) -> np.uint64:
    return np.uint64(_start_of(seed, position))


@lru_cache(maxsize=1024)
def _start_of(seed: int, position: int) -> int:
    return (_key(seed, position, "gumbel") + _GAMMA) & _MASK


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 for one number."""
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _key(seed: int, position: int, purpose: str) -> int:
    return _absorb(_absorb(_purpose(purpose), seed), position)


@lru_cache(maxsize=64)
def _purpose(purpose: str) -> int:
    return _absorb(0, int.from_bytes(b"\1" + purpose.encode(), "big"))  # the 1 keeps leading zeros


def _absorb(state: int, number: int) -> int:
    """Fold any integer into the state, 64 bits at a time, including its sign and length."""
    rest = abs(number)
    state = _mix((state + (_GAMMA if number >= 0 else _SECOND)) & _MASK)
    while True:
        state = _mix(((state ^ (rest & _MASK)) + _GAMMA) & _MASK)
        rest >>= 64
        if rest == 0:
            return state
