"""One row's token: what an engine is asked for in place of a distribution, and the reference for its answer.

`sample_row` is the definition. An engine that has a vocabulary's logits on its device samples many rows in one pass
(`engine.sampling`) and must return the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist, IdArray, IndexArray, ProbArray, best_indices
from paceline.core.sampling.noise import contenders, gumbel, gumbel_of
from paceline.core.sampling.sampler import SamplingParams, apply_mask, filter_top, process_logits, sample

# Ids of a row in the order in which `sample` prefers them.


_PROBE = 128  # the most probable ids that are scored first, for a lower bound of the k-th best score
_NUM_CACHED = 32  # first ids of a ranking that are cached in its distribution: enough for heads, the sample and drafts


def top_by_score(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    """(min(k, n),) indices of the ids with the largest log p + G, falling: the order in which `sample` prefers them.

    At temperature 0, where G is 0, the most probable. Equals by rising index; ids of probability 0 come last.
    """
    if k > _NUM_CACHED:
        return _ranked(dist, params, position, k)
    key = _key(params, position)
    if key not in dist.memo:
        dist.memo[key] = _ranked(dist, params, position, _NUM_CACHED)
    return cast(IndexArray, dist.memo[key])[:k]


def best_margin(dist: Dist, params: SamplingParams, position: int, tokens: Sequence[int]) -> float:
    """Score of the first of these tokens less that of the second, nats; infinite for a single one."""
    if len(tokens) < 2:
        return math.inf
    first, second = (max(dist.prob(token), 1e-300) for token in tokens[:2])
    margin = math.log(first) - math.log(second)
    if params.temperature > 0.0:
        noise, next_noise = gumbel_of(params.seed, position, tokens[:2])
        margin += noise - next_noise
    return margin


def set_ranking(dist: Dist, params: SamplingParams, position: int, best: IndexArray) -> None:
    """Set what `top_by_score` returns, where it is known. best: as many as are cached, or all of `dist`."""
    if len(best) >= min(_NUM_CACHED, len(dist.ids)):
        dist.memo[_key(params, position)] = best


def _key(params: SamplingParams, position: int) -> tuple[str, tuple[int, int] | None]:
    return "ranked", None if params.temperature == 0.0 else (params.seed, position)


def _ranked(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    probs = dist.probs
    if params.temperature == 0.0:
        return best_indices(probs, k)
    if 0 < k <= _PROBE // 4 and len(probs) > _PROBE * 64:
        # At least k ids reach the k-th best score of the most probable ones, and few others can: only those are scored.
        probe = best_indices(probs, _PROBE)
        probed = _scores(dist, params, position, probe[probs[probe] > 0.0])
        if len(probed) >= k:
            lowest = float(np.partition(probed, len(probed) - k)[len(probed) - k])
            places = contenders(params.seed, position, dist.ids, probs, lowest)
            return places[best_indices(_scores(dist, params, position, places), k)]
    places = np.flatnonzero(probs > 0.0)
    best = places[best_indices(_scores(dist, params, position, places), k)]
    if len(best) < min(k, len(probs)):
        best = np.concatenate([best, np.flatnonzero(probs <= 0.0)[: k - len(best)]])
    return best


def _scores(dist: Dist, params: SamplingParams, position: int, places: IndexArray) -> ProbArray:
    """log p + G at these indices, where p is positive."""
    return np.asarray(np.log(dist.probs[places]) + gumbel(params.seed, position, dist.ids[places]))


# The head of a row: the ids that a choice most likely falls on, and bounds for all others.
#
# An engine hands it over in place of a distribution. `core.aggregation.exactness` tests whether two sides' heads
# determine the token of their mixture.


HEAD_BY_SCORE = 32  # ids with the best log p + G
HEAD_BY_PROB = 128  # most probable ids
HEAD_ERROR = 1e-4  # relative error of probabilities that an engine has computed in float32, and of their sums


@dataclass(frozen=True, slots=True, eq=False)
class RowHead:
    """Some ids of a row with their probabilities, exact up to `HEAD_ERROR`."""

    dist: Dist
    best: IndexArray  # indices of its ids with the best log p + G (log p at temperature 0), falling
    scores: ProbArray  # of those
    max_score: float  # no other id has a larger score than this; -inf: there are no others
    max_prob: float  # no other id is more probable; 0: there are no others

    @property
    def whole(self) -> bool:
        """True if no other id has a probability above 0."""
        return self.max_prob == 0.0


def row_head(dist: Dist, params: SamplingParams, position: int) -> RowHead:
    """The definition. dist: dense, after processing, before top-k, top-p and min-p."""
    best = top_by_score(dist, params, position, HEAD_BY_SCORE)
    with np.errstate(divide="ignore"):
        scores = np.log(dist.probs[best])
    if params.temperature > 0.0:
        scores = scores + gumbel(params.seed, position, dist.ids[best])
    if len(dist.ids) <= HEAD_BY_PROB:
        return RowHead(dist, best, scores, -math.inf, 0.0)
    likely = best_indices(dist.probs, HEAD_BY_PROB)
    max_prob = float(dist.probs[likely[-1]])
    max_score = float(scores[-1]) if params.temperature > 0.0 else math.log(max_prob) if max_prob else -math.inf
    kept = np.union1d(likely, best)
    return RowHead(dist.kept_at(kept), np.searchsorted(kept, best), scores, max_score, max_prob)


class RowSampling(msgspec.Struct, frozen=True, eq=False):
    """How to sample the token after one row."""

    params: SamplingParams
    position: int  # absolute output position: that of the noise
    vocab_size: int  # of the tokenizer; an engine's logits beyond it are padding
    counts: Mapping[int, int] = msgspec.field(default_factory=dict)  # of tokens in the output before this row
    prompt: IdArray | None = None  # distinct ids of the prompt, where the repetition penalty needs them
    allowed: NDArray[np.bool_] | None = (
        None  # (vocab_size or more,) under a constraint, with at least one id; None: all
    )
    num_top: int = 0  # ids of the row's head to return as well

    @property
    def changes_logits(self) -> bool:
        """True if ids get other logits than the model's, apart from the temperature."""
        return self.allowed is not None or bool(self.params.logit_bias) or self.params.looks_back


class SampledRow(msgspec.Struct, frozen=True, eq=False):
    token: int
    top: Dist | None = None  # the `num_top` most probable ids at temperature 1, without penalties; None: not wanted
    branch_probs: tuple[float, ...] = ()  # of several branches: the token's probability in each, without penalties
    head: RowHead | None = None  # of the mixture, processed; None: not wanted, or `dists` must be read
    branch_heads: tuple[
        Dist, ...
    ] = ()  # where heads are wanted: what `decayed_evidence` needs of each branch, as `branch_probs`
    dists: Callable[[], tuple[Dist, ...]] | None = None  # likewise: each branch's distribution, read when called


def sample_row(dist: Dist, row: RowSampling) -> SampledRow:
    """The reference. dist: dense, at temperature 1, before any processing."""
    plain = dist.within(row.vocab_size)
    masked = plain if row.allowed is None else apply_mask(plain, row.allowed)
    processed = process_logits(masked, row.params, row.counts, row.prompt)
    token = sample(filter_top(processed, row.params), row.params, row.position)
    return SampledRow(token, head(plain, row.num_top) if row.num_top else None)


def head(dist: Dist, k: int) -> Dist:
    """The k most probable ids; of equals the lowest. Those of probability 0 are left out."""
    places = best_indices(dist.probs, k)
    places = np.sort(places[dist.probs[places] > 0.0])
    probs = dist.probs[places]
    return Dist(dist.ids[places], probs, max(1.0 - float(probs.sum()), 0.0))


# Rows of a draft tree of which only those are sampled that the tokens lead to.
#
# Verification reads one path: the token after a row leads to the child that holds it. No token is needed of the rows
# beside that path, and of eight rows they are most.


NOT_SAMPLED: Final = SampledRow(-1)  # in place of a row to which no token leads


class RowTree(NamedTuple):
    """Children of one row hold distinct tokens."""

    parents: tuple[int, ...]  # (rows,) parents[i] < i, -1: none, so the row is sampled in any case
    tokens: tuple[int, ...]  # (rows,) that each row holds

    @property
    def roots(self) -> list[int]:
        return [row for row, parent in enumerate(self.parents) if parent < 0]

    def child(self, row: int, token: int) -> int | None:
        """The row to which the token sampled after `row` leads."""
        for at in range(row + 1, len(self.parents)):
            if self.parents[at] == row and self.tokens[at] == token:
                return at
        return None
