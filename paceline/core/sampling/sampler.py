"""Sampling parameters and the one order of operations, everywhere:

scores → grammar mask (`masked`) → repetition penalty, bias, penalties → temperature → softmax (`warp`) → mixture over
documents, then sides (`aggregation`) → top-k, top-p, min-p (`truncate`) → noise → token (`choose`).

Temper then mix. At temperature 0 the target is the argmax of the temperature-1 mixture, so `warp` leaves the
temperature alone there and `choose` adds no noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import cast

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist, IdArray, IndexArray, ProbArray, best_indices
from paceline.core.sampling.noise import contenders, gumbel


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Field names and ranges are OpenAI's, besides those it does not have: `top_k`,
    `min_p` and `repetition_penalty` are Hugging Face's.

    Ranges are the API's to check; a machine may rely on them.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0  # subtracted once from the score of a token that was generated before
    frequency_penalty: float = 0.0  # subtracted once per earlier occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    # A score above 0 is divided by it, one below multiplied, once for each token of the prompt or the output (CTRL,
    # Keskar et al. 2019). 1: off.
    repetition_penalty: float = 1.0

    @property
    def looks_back(self) -> bool:
        """Does a token's score depend on what was generated before?"""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request does not say. None: whatever the next one in turn says, at last `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These, and the other's where these say nothing."""
        names = [each.name for each in fields(self)]
        mine = {name: getattr(self, name) for name in names}
        return SamplingDefaults(**{name: getattr(other, name) if mine[name] is None else mine[name] for name in names})


NO_DEFAULTS = SamplingDefaults()


def process_logits(
    dist: Dist, params: SamplingParams, counts: Mapping[int, int], prompt: IdArray | None = None
) -> Dist:
    """Bias, penalties and temperature, as if on scores: log-probabilities serve, softmax forgets the difference.

    counts: how often each token occurs among the generated ones (the prompt does not count, as in OpenAI's API).
    prompt: (any,) ids that the repetition penalty counts besides, as in Hugging Face's and vLLM's.
    Returns `dist` itself when there is nothing to do. Ids outside the distribution are ignored. Of a sparse
    distribution the tail is warped like one token without bias: exact at temperatures 0 and 1, else only an estimate.
    """
    places, shifts = _shifts(dist, params, counts)
    if params.repetition_penalty != 1.0:
        places, shifts = _with_repetition(dist, params.repetition_penalty, counts, prompt, places, shifts)
    exponent = 1.0 if params.temperature == 0.0 else 1.0 / params.temperature
    if exponent == 1.0:
        if len(places) == 0:
            return dist
        if float(np.abs(shifts).max()) <= _SAFE_SHIFT:
            probs = dist.probs.copy()
            probs[places] *= np.exp(shifts)
            total = float(probs.sum()) + dist.tail
            if total > 0.0:
                probs /= total
                return Dist(dist.ids, probs, dist.tail / total)
    return _process_in_logs(dist, places, shifts, exponent)


def apply_mask(dist: Dist, allowed: NDArray[np.bool_]) -> Dist:
    """Only what is allowed, in proportion; if that has no probability at all, every allowed token alike.

    Before `warp`: bias and penalties leave each other's tokens alone, so the order changes nothing but that no allowed
    token is lost beside a forbidden one that is far more probable.
    dist: dense, (vocab_size,). allowed: (vocab_size,) or longer; at least one of the ids is allowed, or ValueError.
    """
    which = allowed[: len(dist.ids)]
    probs = np.where(which, dist.probs, 0.0)
    best = float(probs.max(initial=0.0))
    log_norm = dist.log_norm
    if best > 0.0:
        probs /= best  # so that nothing is lost where all that is allowed is very unlikely
        log_norm += float(np.log(best) + np.log(probs.sum()))
    elif which.any():
        probs[which] = 1.0
    else:
        raise ValueError("no token is allowed")
    probs /= probs.sum()
    return Dist(dist.ids, probs, log_norm=log_norm)


_SAFE_SHIFT = 300.0  # exp of it, times a probability, is far from float64's limits


def _process_in_logs(dist: Dist, places: IndexArray, shifts: ProbArray, exponent: float) -> Dist:
    with np.errstate(divide="ignore"):  # log 0 is -inf here, and stays impossible
        scores = np.log(dist.probs)
        tail = float(np.log(np.float64(dist.tail)))
    scores[places] += shifts
    best = max(float(scores.max(initial=-np.inf)), tail)
    if best == -np.inf:
        return dist  # nothing has mass: nothing to move
    scores -= best
    scores *= exponent
    np.exp(scores, out=scores)
    tail = float(np.exp((tail - best) * exponent))
    total = float(scores.sum()) + tail
    scores /= total
    return Dist(dist.ids, scores, tail / total)


def _shifts(dist: Dist, params: SamplingParams, counts: Mapping[int, int]) -> tuple[IndexArray, ProbArray]:
    """Where scores change, and by how much: OpenAI's formula, bias - count * frequency - (count > 0) * presence."""
    penalised = params.presence_penalty or params.frequency_penalty
    if not (penalised or params.logit_bias):
        return _NOWHERE, _NO_SHIFTS
    by_token = dict(params.logit_bias)
    if penalised:
        for token, count in counts.items():
            if count > 0:
                penalty = count * params.frequency_penalty + params.presence_penalty
                by_token[token] = by_token.get(token, 0.0) - penalty
    found = [(at, shift) for token, shift in by_token.items() if shift and (at := dist.index(token)) is not None]
    places = np.array([at for at, _ in found], dtype=np.intp)
    return places, np.array([shift for _, shift in found], dtype=np.float64)


def _with_repetition(
    dist: Dist,
    penalty: float,
    counts: Mapping[int, int],
    prompt: IdArray | None,
    places: IndexArray,
    shifts: ProbArray,
) -> tuple[IndexArray, ProbArray]:
    """The same with what the repetition penalty moves scores by, which comes first."""
    said = np.fromiter((token for token, count in counts.items() if count > 0), dtype=np.int32)
    ids = np.unique(said if prompt is None else np.concatenate((said, prompt)))
    repeated = ids[ids < len(dist.ids)].astype(np.intp) if dist.leading else np.flatnonzero(np.isin(dist.ids, ids))
    repeated = repeated[dist.probs[repeated] > 0.0]
    scores = np.log(dist.probs[repeated]) + dist.log_norm
    moved = np.zeros(len(dist.ids))
    moved[repeated] = np.where(scores > 0.0, scores / penalty, scores * penalty) - scores
    moved[places] += shifts
    where = np.flatnonzero(moved)
    return where, moved[where]


_NOWHERE: IndexArray = np.empty(0, dtype=np.intp)
_NO_SHIFTS: ProbArray = np.empty(0, dtype=np.float64)
_FEW = 512  # up to here the noise of all ids costs less than finding out whose is needed


def filter_top(dist: Dist, params: SamplingParams) -> Dist:
    """Top-k, then top-p of what that left, then min-p relative to the maximum; equals fall by id, lower ids stay.

    Top-p keeps the smallest set whose share is at least `top_p`, the crossing token included. At least one token stays.
    Not renormalised: what is cut goes to the tail. Returns `dist` itself when nothing is cut. At temperature 0 nothing
    is cut, because the argmax survives each of the three.
    """
    if params.temperature == 0.0 or len(dist.ids) == 0:
        return dist
    key = "truncate", params.top_k, params.top_p, params.min_p
    known = dist.memo.get(key)
    if known is None:
        known = _filter_top(dist, params)
        if known is not dist:  # a law that refers to itself would outlive its last user
            dist.memo[key] = known
    return cast(Dist, known)


def _filter_top(dist: Dist, params: SamplingParams) -> Dist:
    probs = dist.probs
    cut_k, cut_p = 0 < params.top_k < len(probs), params.top_p < 1.0
    floor = params.min_p * float(probs.max()) if params.min_p > 0.0 else 0.0
    if not cut_k and not cut_p:
        return dist.kept(probs >= floor) if floor else dist
    if cut_k:
        falling = probs[best_indices(probs, params.top_k)]
        total = float(falling.sum())
    else:
        total = float(probs.sum()) + dist.tail
        falling = _head(probs, params.top_p, total)
    keep = len(falling)
    if cut_p:
        reached = np.cumsum(falling) >= params.top_p * total
        keep = int(np.argmax(reached)) + 1 if reached.any() else keep
    if floor:
        keep = min(keep, int(np.count_nonzero(falling >= floor)))
    return dist.kept(_largest(probs, keep, float(falling[keep - 1])))


def _head(probs: ProbArray, top_p: float, total: float) -> ProbArray:
    """The largest probabilities, falling, as many as surely hold `top_p` of the total. Spares sorting a vocabulary.

    Of most rows a few hundred do. Else all that lie below the floor together do not amount to what may be left off.
    """
    first = probs[best_indices(probs, _FEW)]
    if float(first.sum()) >= top_p * total * (1.0 + 1e-9):
        return first
    floor = (1.0 - top_p) * total / (len(probs) + 1)
    return np.sort(probs[probs >= min(floor, float(probs.max()))])[::-1]


def _largest(probs: ProbArray, keep: int, edge: float) -> NDArray[np.bool_]:
    """Mask of the `keep` largest, of which `edge` is the least; of those equal to it the lowest ids."""
    mask = probs > edge
    ties = np.flatnonzero(probs == edge)
    mask[ties[: keep - int(np.count_nonzero(mask))]] = True
    return mask


def sample(dist: Dist, params: SamplingParams, position: int) -> int:
    """The token: argmax(log p + G) over `ids` with G from `noise.gumbel(seed, position, ids)`; G is 0 at temperature 0.

    Of equals the lowest id. A token of probability 0 is never chosen, and the tail cannot be: truncate or certify
    first. Raises ValueError when no id has any probability. position: absolute output position.
    """
    first = int(dist.probs.argmax()) if len(dist.probs) else 0
    if len(dist.probs) == 0 or not dist.probs[first] > 0.0:
        raise ValueError("no token has a probability above 0")
    if params.temperature == 0.0:
        return int(dist.ids[first])
    if len(dist.ids) <= _FEW:
        places = np.flatnonzero(dist.probs)
    else:
        # Only ids that can beat the most probable one are looked at closely: for most rows a handful of them all.
        start = float(np.log(dist.probs[first]) + gumbel(params.seed, position, dist.ids[first : first + 1])[0])
        places = contenders(params.seed, position, dist.ids, dist.probs, start)
    ids = dist.ids[places]
    scores = np.log(dist.probs[places]) + gumbel(params.seed, position, ids)
    return int(ids[int(np.argmax(scores))])
