"""Common random numbers: noise as a function of (seed, position, token id), the same on every side.

Stateless: any subset of ids, at any position and in any order of calls, has the same values. They are independent
standard Gumbel numbers, G = -log(x) with x exponential, made top-down (Maddison, Tarlow and Minka 2014, "A* sampling",
for exponentials): ids are taken in groups of `GROUP`, the least x of a group is drawn first (exponential, divided by
the group's size, at an id drawn uniformly), and every other x of the group is that one plus an exponential of its own,
because exponentials have no memory. So one number bounds the noise of a whole group, and a sampler reads the noise of
few ids of a vocabulary (`contenders`).

The hash is SplitMix64 (Steele, Lea, Flood 2014) started from a key of seed, position and purpose, with the token id, or
2**32 plus the group's number, as its counter. The values are part of the wire contract: two sides of different versions
must agree on them, so a test pins them. Not for secrets: the hash is not cryptographic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import IdArray, IndexArray, ProbArray

GROUP = 64  # ids; the group of an id is id // GROUP
GROUP_BITS = 6
FIRST_GROUP = 1 << 32  # counter of group 0: beyond all ids
_MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB

# 52 bits plus one half: every u is exact in float64 and strictly between 0 and 1.
STEP = 2.0**-52
_SLACK = 1.0 + 1e-9  # more than the rounding of products and logarithms
_CHUNK = 8192  # ids per pass of the hash: its arrays fit the CPU cache and need no memory from the system


def gumbel(seed: int, position: int, ids: IdArray) -> NDArray[np.float64]:
    """Standard Gumbel noise. ids: (n,) → (n,). The value of an id does not depend on the other ids."""
    noise = np.empty(len(ids))
    key = np.uint64(_start_of(seed, position))
    consecutive = _is_whole(ids)
    for begin in range(0, len(ids), _CHUNK):
        x = _exponentials(key, ids[begin : begin + _CHUNK], consecutive=consecutive)
        np.negative(np.log(x, out=x), out=noise[begin : begin + _CHUNK])
    return noise


def gumbel_of(seed: int, position: int, tokens: Iterable[int]) -> list[float]:
    """`gumbel` for a few tokens, in a third of the time. For drafts only: the logarithm may round differently."""
    key, log, found = _start_of(seed, position), math.log, []
    for token in tokens:
        group = token >> GROUP_BITS
        z = ((FIRST_GROUP + group) * GAMMA + key) & _MASK  # `_mix`, without the calls
        z = ((z ^ (z >> 30)) * FIRST) & _MASK
        z = ((z ^ (z >> 27)) * SECOND) & _MASK
        z ^= z >> 31
        x = -log(((z >> 12) + 0.5) * STEP) / GROUP
        if (z ^ token) & (GROUP - 1):
            z = (token * GAMMA + key) & _MASK
            z = ((z ^ (z >> 30)) * FIRST) & _MASK
            z = ((z ^ (z >> 27)) * SECOND) & _MASK
            x -= log((((z ^ (z >> 31)) >> 12) + 0.5) * STEP)
        found.append(-log(x))
    return found


def gumbel_rows(keys: NDArray[np.uint64], ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """`gumbel` for many positions at once. keys: (rows,) of `row_keys`. ids: (rows, n) → (rows, n)."""
    return -np.log(_exponentials(np.repeat(keys, ids.shape[1]), ids.reshape(-1))).reshape(ids.shape)


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """(rows,) keys of the noise at these positions, each below 2**63, under these seeds."""
    gamma = np.uint64(GAMMA)
    states = np.array([_seeded(seed, "gumbel") for seed in seeds], dtype=np.uint64)
    places = np.array(positions, dtype=np.int64).astype(np.uint64)
    return mixed((mixed(states + gamma) ^ places) + gamma) + gamma  # `_absorb` of all, and the first counter


def group_minima(keys: NDArray[np.uint64], num_groups: int) -> NDArray[np.float64]:
    """The least x of each group: exp(-G) of every id of the group is at least that. (rows,) → (rows, groups)."""
    counters = np.arange(FIRST_GROUP, FIRST_GROUP + num_groups, dtype=np.uint64) * np.uint64(GAMMA)
    return -np.log(uniforms(mixed(keys[:, None] + counters))) / GROUP


def uniform(seed: int, position: int, purpose: str) -> float:
    """A number in (0, 1) for this position and purpose, independent of `gumbel` and of other purposes."""
    bits = _mix((_key(seed, position, purpose) + GAMMA) & _MASK)
    return ((bits >> 12) + 0.5) * STEP


def contenders(seed: int, position: int, ids: IdArray, weights: ProbArray, score: float) -> IndexArray:
    """Indices of the ids whose log(weight) + noise reaches `score`, and of a few that rounding might let reach it.

    ids: ascending. weights: (n,) >= 0. Noise reaches `score - log(w)` only if x <= w * exp(-score), which the least x
    of most groups rules out.
    """
    key = _start_of(seed, position)
    limit = float(np.exp(min(-score, 600.0))) * _SLACK  # exp(600) is finite
    if _is_whole(ids):
        whole = len(ids) - len(ids) % GROUP
        least = _all_minima(key, whole // GROUP) / limit
        places = np.flatnonzero(weights[:whole].reshape(-1, GROUP) >= least[:, None])
        places = np.concatenate((places, np.arange(whole, len(ids))))
    else:
        places = np.flatnonzero(weights >= STEP / 2 / GROUP / limit)  # the least x there can be
    x = _exponentials(np.uint64(key), ids[places])
    return places[weights[places] * limit >= x]


def _is_whole(ids: IdArray) -> bool:
    """True if these ascending ids are 0, 1, … without a gap, and at least a group."""
    return len(ids) >= GROUP and int(ids[-1]) == len(ids) - 1 and int(ids[0]) == 0


@lru_cache(maxsize=64)  # positions: 19 kB each with 152,000 ids
def _all_minima(key: int, num_groups: int) -> NDArray[np.float64]:
    """`group_minima` of one position: siblings in a tree, and both sides' distributions there, need the same ones."""
    (minima,) = group_minima(np.array([key], dtype=np.uint64), num_groups)
    return np.asarray(minima)


def _exponentials(
    key: np.uint64 | NDArray[np.uint64], ids: NDArray[np.integer], *, consecutive: bool = False
) -> NDArray[np.float64]:
    """x of each id. key: one for all, or (n,). ids: (n,). consecutive: from a multiple of `GROUP` on; takes half of the
    time."""
    token = ids.astype(np.uint64)
    group = (token[::GROUP] if consecutive else token) >> np.uint64(GROUP_BITS)
    hashes = mixed((group + np.uint64(FIRST_GROUP)) * np.uint64(GAMMA) + key)
    least: NDArray[np.float64] = -np.log(uniforms(hashes)) / GROUP
    if consecutive:
        hashes, least = np.repeat(hashes, GROUP)[: len(ids)], np.repeat(least, GROUP)[: len(ids)]
    own = -np.log(uniforms(mixed(token * np.uint64(GAMMA) + key)))
    own[(hashes ^ token) & np.uint64(GROUP - 1) == 0] = 0.0
    return least + own


def mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64. It relies on uint64 arrays wrapping around, which numpy does without a warning."""
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(FIRST)
    z ^= z >> np.uint64(27)
    z *= np.uint64(SECOND)
    z ^= z >> np.uint64(31)
    return z


def uniforms(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In (0, 1), of the 52 highest bits; the 6 lowest say which id of a group has its least x."""
    bits = (hashes >> np.uint64(12)).view(np.int64)  # below 2**52 the signed value is the same, and converts faster
    u: NDArray[np.float64] = bits.astype(np.float64)
    u += 0.5
    u *= STEP
    return u


@lru_cache(maxsize=1024)
def _start_of(seed: int, position: int) -> int:
    return (_key(seed, position, "gumbel") + GAMMA) & _MASK


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 for one number."""
    z = ((z ^ (z >> 30)) * FIRST) & _MASK
    z = ((z ^ (z >> 27)) * SECOND) & _MASK
    return z ^ (z >> 31)


def _key(seed: int, position: int, purpose: str) -> int:
    return _absorb(_seeded(seed, purpose), position)


@lru_cache(maxsize=1024)
def _seeded(seed: int, purpose: str) -> int:
    return _absorb(_purpose(purpose), seed)


@lru_cache(maxsize=64)
def _purpose(purpose: str) -> int:
    return _absorb(0, int.from_bytes(b"\1" + purpose.encode(), "big"))  # the 1 keeps leading zeros


def _absorb(state: int, number: int) -> int:
    """Fold any integer into the state, 64 bits at a time, including its sign and length."""
    rest = abs(number)
    state = _mix((state + (GAMMA if number >= 0 else SECOND)) & _MASK)
    while True:
        state = _mix(((state ^ (rest & _MASK)) + GAMMA) & _MASK)
        rest >>= 64
        if rest == 0:
            return state
