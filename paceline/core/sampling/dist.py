"""Next-token distributions, which engines return, machines compare and the wire carries; and the noise that draws.

For sampling parameters see `sampler` and `aggregation.weights`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.int32]
ProbArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]


@lru_cache(maxsize=16)
def token_ids(vocab_size: int) -> IdArray:
    """(vocab_size,) 0, 1, …: read-only, shared by all dense distributions of a vocabulary."""
    ids = np.arange(vocab_size, dtype=np.int32)
    ids.flags.writeable = False
    return ids


@dataclass(frozen=True, slots=True, eq=False)
class Dist:
    """Probabilities of some token ids, and the mass of all other ids.

    Dense as returned by an engine (`ids` is 0..vocab-1 and `tail` 0), sparse after top-k / top-p / min-p or from the
    wire. Never renormalised implicitly: probs.sum() + tail == 1 up to rounding.
    The arrays are shared, not copied: treat them as read-only.
    """

    ids: IdArray  # (kept,) ascending, distinct
    probs: ProbArray  # (kept,) >= 0
    tail: float = 0.0  # mass of the ids that are not in `ids`
    log_norm: float = 0.0  # the model's logit of an id is log(prob) + log_norm; 0 where there are no logits
    # Cache of pure functions of this distribution that cost a pass over the vocabulary, each under its own key. Kept
    # here so that it is freed with the distribution.
    memo: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @staticmethod
    def dense(probs: ProbArray, log_norm: float = 0.0) -> Dist:
        """probs: (vocab,), not copied."""
        return Dist(token_ids(len(probs)), probs, log_norm=log_norm)

    @staticmethod
    def head(ids: NDArray[np.integer], probs: ProbArray) -> Dist:
        """Some ids of a row, distinct, in any order: the tail is what their probabilities lack of 1."""
        order = np.argsort(ids)
        kept = probs[order]
        return Dist(ids[order].astype(np.int32, copy=False), kept, max(1.0 - float(kept.sum()), 0.0))

    @property
    def leading(self) -> bool:
        """True if the ids are 0, 1, … without a gap, so that each id is its own index."""
        return len(self.ids) > 0 and int(self.ids[-1]) == len(self.ids) - 1

    def index(self, token: int) -> int | None:
        """Index of `token` in `ids`; None if absent."""
        if self.leading:
            return token if 0 <= token < len(self.ids) else None
        at = bisect_left(self.ids, token)
        return at if at < len(self.ids) and int(self.ids[at]) == token else None

    def prob(self, token: int) -> float:
        """Probability of `token`; 0 if it is not in `ids`, even though the tail may contain its mass."""
        at = self.index(token)
        return 0.0 if at is None else float(self.probs[at])

    def within(self, vocab_size: int) -> Dist:
        """Restrict to the ids below `vocab_size`, without the padding of an engine's vocabulary, and renormalise.

        Returns this object if nothing is padding. For dense distributions only.
        """
        if len(self.ids) <= vocab_size:
            return self
        probs = self.probs[:vocab_size]
        total = float(probs.sum())
        return Dist.dense(probs / total, self.log_norm + math.log(total))

    def argmax(self) -> int:
        """The most probable of `ids`; of equals the lowest id. Raises ValueError if there are no ids."""
        return int(self.ids[int(self.probs.argmax())])

    def top(self, k: int) -> list[tuple[int, float]]:
        """At most k pairs (token, probability) by falling probability, equals by rising id, without zeros."""
        best = best_indices(self.probs, k)
        return [(int(self.ids[i]), float(self.probs[i])) for i in best if self.probs[i] > 0.0]

    def entropy(self) -> float:
        """Entropy in nats. The tail counts as one token, so for a sparse distribution this is a lower bound."""
        positive = self.probs[self.probs > 0.0]
        tail = -self.tail * float(np.log(self.tail)) if self.tail > 0.0 else 0.0
        return tail - float(positive @ np.log(positive))

    def kept(self, which: NDArray[np.bool_]) -> Dist:
        """As `kept_at`, by a mask over `ids`."""
        return self.kept_at(np.flatnonzero(which))

    def kept_at(self, index: IndexArray) -> Dist:
        """Keep a subset. index: (kept,) indices into `ids`, distinct, ascending. Dropped mass moves to the tail.

        Returns this object if nothing is dropped.
        """
        if len(index) == len(self.ids):
            return self
        probs = self.probs[index]
        dropped = float(self.probs.sum()) - float(probs.sum())
        return Dist(self.ids[index], probs, self.tail + max(dropped, 0.0))


def best_indices(values: ProbArray, k: int) -> IndexArray:
    """(min(k, n),) indices of the k largest values, falling; equals by rising index. No full sort for k << n.

    One pass for k << n: at least k values, and few more, reach the k-th largest of the groups' maxima, and all of them
    are in groups whose maximum reaches it. A group is a column of a matrix, because maxima of columns take a fraction
    of the time of maxima of rows.
    """
    n = len(values)
    if k <= 0 or n == 0:
        return np.empty(0, dtype=np.intp)
    groups = n // _GROUP
    if 4 * k <= groups:
        grouped = groups * _GROUP
        best = values[:grouped].reshape(_GROUP, groups).max(axis=0)
        floor = np.partition(best, groups - k)[groups - k]
        reaching = np.flatnonzero(best >= floor)
        if len(reaching) > 4 * k:  # flat after its first tokens: keep the lowest ties
            above = np.flatnonzero(values > floor)
            level = np.flatnonzero(values == floor)[: max(k - len(above), 0)]
            candidates: IndexArray = np.concatenate((above, level))
        else:
            inside = np.arange(_GROUP)[:, None] * groups + reaching  # ascending in row-major order
            places = np.concatenate((inside.reshape(-1), np.arange(grouped, n)))
            candidates = places[values[places] >= floor]  # all ties included, so that the sort orders them by index
    else:
        floor = np.partition(values, n - k)[n - k] if k < n else -np.inf
        candidates = np.flatnonzero(values >= floor)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:k]]


_GROUP = 64  # values


# Distributions quantized to 16 bits per probability, before a token is drawn from them and they are sent.
#
# Verification is exact only under the distribution that the token was drawn from, so the sender rounds first and draws
# then. Probabilities are not renormalised (7.3 of the specification): a code is a window of the float64's own bits, 5
# of the exponent and 11 of the mantissa, truncated below, so that no platform's exp or log affects the rounding.
# Quantized probabilities are multiples of 2**-42, whose sums are exact in any order; the tail is what they lack of 1.


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


# Common random numbers: noise as a function of (seed, position, token id), the same on every side.
#
# Stateless: any subset of ids, at any position and in any order of calls, has the same values. They are independent
# standard Gumbel numbers, G = -log(x) with x exponential, made top-down (Maddison, Tarlow and Minka 2014, "A*
# sampling", for exponentials): ids are taken in groups of `GROUP`, the least x of a group is drawn first (exponential,
# divided by the group's size, at an id drawn uniformly), and every other x of the group is that one plus an
# exponential of its own, because exponentials have no memory. So one number bounds the noise of a whole group, and a
# sampler reads the noise of few ids of a vocabulary (`contenders`).
#
# The hash is SplitMix64 (Steele, Lea, Flood 2014) started from a key of seed, position and purpose, with the token id,
# or 2**32 plus the group's number, as its counter. The values are part of the wire contract: two sides of different
# versions must agree on them, so a test pins them. Not for secrets: the hash is not cryptographic.


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
        z = ((FIRST_GROUP + group) * GAMMA + key) & _MASK  # `mixed_number`, without the calls
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
    bits = mixed_number((_key(seed, position, purpose) + GAMMA) & _MASK)
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


def mixed_number(z: int) -> int:
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
    state = mixed_number((state + (GAMMA if number >= 0 else SECOND)) & _MASK)
    while True:
        state = mixed_number(((state ^ (rest & _MASK)) + GAMMA) & _MASK)
        rest >>= 64
        if rest == 0:
            return state
