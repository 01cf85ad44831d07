"""Tokens of rows of which only some ids' log-probabilities are known: those that a server tells.

Whatever is not told of an id has a bound, the least of the told ones, since these are the likeliest. With the common
noise that tells which other ids might be sampled. Knows no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.core.aggregation.weights import softmax
from paceline.core.sampling.dist import Dist, IdArray, IndexArray, ProbArray, contenders, gumbel, token_ids
from paceline.core.sampling.sampler import RowHead, RowSampling, logit_shifts

HEAD: Final = 20  # likeliest ids that are asked for: what vLLM tells by default
MAX_LIFTED: Final = 2048  # ids of a row that are asked for by name
_ROUNDING: Final = 1e-6  # nats


@dataclass(frozen=True, slots=True, eq=False)
class ToldRow:
    """The likeliest ids of a row, and others that were asked for."""

    logprobs: Mapping[int, float]
    bound: float  # no other id has a greater one; -inf: there is no other
    vocab_size: int

    @staticmethod
    def of(likeliest: Mapping[int, float], vocab_size: int) -> ToldRow:
        whole = len(likeliest) >= vocab_size
        return ToldRow(likeliest, -math.inf if whole else min(likeliest.values(), default=0.0), vocab_size)

    def and_also(self, logprobs: Mapping[int, float]) -> ToldRow:
        return ToldRow({**logprobs, **self.logprobs}, self.bound, self.vocab_size)

    @property
    def is_whole(self) -> bool:
        return self.bound == -math.inf

    @property
    def tail(self) -> float:
        """Mass of the other ids."""
        return 0.0 if self.is_whole else max(0.0, 1.0 - math.fsum(map(math.exp, self.logprobs.values())))

    def ids(self) -> IdArray:
        return np.fromiter(self.logprobs, dtype=np.int32)

    def dist(self) -> Dist:
        """Dense: the mass of the other ids is spread over them evenly."""
        ids = self.ids()
        others = self.vocab_size - len(ids)
        probs = np.full(self.vocab_size, self.tail / others if others > 0 else 0.0)
        probs[ids] = np.exp(np.fromiter(self.logprobs.values(), dtype=np.float64))
        return Dist.dense(probs / probs.sum())

    def head(self, k: int, also: int | None = None) -> Dist:
        """The k likeliest ids, and this one."""
        ids = {*sorted(self.logprobs, key=lambda token: -self.logprobs[token])[:k]}
        if also is not None and also in self.logprobs:
            ids.add(also)
        return Dist.head(np.array([*ids], dtype=np.int32), np.exp([self.logprobs[token] for token in ids]))


@dataclass(frozen=True, slots=True)
class Settled:
    """Need of a row's token: nothing, further ids, or the server's own draw."""

    lifted: tuple[int, ...] = ()  # ids to ask for
    own_draw: bool = False  # whether that is so depends on no noise, so that the draw is of the same distribution
    is_exact: bool = True  # the reference of the told ids is that of the whole row, once `lifted` are told


EXACT: Final = Settled()
OWN_DRAW: Final = Settled(own_draw=True)
APPROXIMATE: Final = Settled(is_exact=False)


def settled(row: ToldRow, sampling: RowSampling) -> Settled:
    """Ids and bounds that settle the token of a row of one branch."""
    params = sampling.params
    if params.repetition_penalty != 1.0:
        return OWN_DRAW  # needs logits, of which log-probabilities lack the sum
    if row.is_whole:
        return EXACT
    shifts = logit_shifts(params, sampling.counts)
    beyond = max((shift for token, shift in shifts.items() if token not in row.logprobs), default=0.0)
    bound = row.bound + max(0.0, beyond)
    known = {token: value + shifts.get(token, 0.0) for token, value in row.logprobs.items() if _allows(sampling, token)}
    best = max(known.values(), default=-math.inf)
    if params.temperature == 0.0:
        return EXACT if best >= bound and best > -math.inf else OWN_DRAW
    if params.filters:
        return EXACT if _is_within(row, known, bound, sampling) else OWN_DRAW
    if best == -math.inf:
        return OWN_DRAW  # of the constraint's tokens none is told
    temperature = params.temperature
    ids, values = np.fromiter(known, dtype=np.int32), np.fromiter(known.values(), dtype=np.float64)
    score = float((values / temperature + gumbel(params.seed, sampling.position, ids)).max())
    weights = np.full(sampling.vocab_size, math.exp(bound / temperature + _ROUNDING))
    if sampling.allowed is not None:
        weights[~sampling.allowed[: sampling.vocab_size]] = 0.0
    weights[[token for token in row.logprobs if token < sampling.vocab_size]] = 0.0
    return _asking(contenders(params.seed, sampling.position, token_ids(sampling.vocab_size), weights, score))


def _asking(ids: Sequence[int] | IndexArray) -> Settled:
    return Settled(tuple(map(int, ids))) if len(ids) <= MAX_LIFTED else APPROXIMATE


def _allows(sampling: RowSampling, token: int) -> bool:
    return token < sampling.vocab_size and (sampling.allowed is None or bool(sampling.allowed[token]))


def _is_within(row: ToldRow, known: Mapping[int, float], bound: float, sampling: RowSampling) -> bool:
    """Top-k, top-p and min-p surely keep told ids alone, and it is sure which.

    The other ids' share of the mass at this temperature is not known unless nothing is changed; both its extremes must
    keep the same.
    """
    params = sampling.params
    falling = sorted(known.values(), reverse=True)
    sure = [value for value in falling if value > bound]  # no other id is among these
    if not sure:
        return False
    powers: ProbArray = np.exp((np.array(sure) - sure[0]) / params.temperature)
    keep = len(sure) + 1  # more than are told
    if params.min_p and math.exp((bound - sure[0]) / params.temperature) < params.min_p:
        keep = min(keep, int(np.count_nonzero(powers >= params.min_p)))
    if 0 < params.top_k <= len(sure):
        keep = min(keep, params.top_k)
    if params.top_p < 1.0:
        is_cut = 0 < params.top_k <= len(sure)
        masses = {float(powers[: params.top_k].sum())} if is_cut else _masses(row, falling, sure[0], bound, sampling)
        counts = {_reaching(powers, params.top_p * mass) for mass in masses}
        if len(counts) > 1 and keep > min(counts):
            return False
        keep = min(keep, *counts)
    return keep <= len(sure)


def _reaching(powers: ProbArray, mass: float) -> int:
    """How many of the largest reach this mass; one more than there are if all do not."""
    reached = np.cumsum(powers) >= mass
    return int(np.argmax(reached)) + 1 if reached.any() else len(powers) + 1


def _masses(row: ToldRow, falling: Sequence[float], best: float, bound: float, sampling: RowSampling) -> set[float]:
    """Least and greatest sum of all ids' powers, in units of the best one's."""
    temperature = sampling.params.temperature
    told = math.fsum(math.exp((value - best) / temperature) for value in falling)
    if temperature == 1.0 and not sampling.changes_logits:
        return {told + row.tail * math.exp(-best)}
    most = (sampling.vocab_size - len(row.logprobs)) * math.exp((bound - best) / temperature)
    if temperature <= 1.0 and not sampling.changes_logits:
        most = min(most, row.tail * math.exp(bound * (1.0 / temperature - 1.0) - best / temperature))
    return {told, told + most}


def settled_mixture(rows: Sequence[ToldRow], log_weights: Sequence[float], sampling: RowSampling) -> Settled:
    """Ids and bounds that settle the token of a mixture of branches.

    Not handled, and then approximate: filters, constraints, penalties, and temperatures but 0 and 1, under which the
    told ids do not tell a branch's share of the mixture.
    """
    params = sampling.params
    filters = params.temperature > 0.0 and params.filters
    if all(row.is_whole for row in rows):
        return EXACT
    if params.temperature not in (0.0, 1.0) or filters or sampling.changes_logits:
        return APPROXIMATE
    weights = softmax(list(log_weights))
    caps = [min(math.exp(row.bound), row.tail) for row in rows]
    beyond = math.fsum(weight * cap for weight, cap in zip(weights, caps, strict=True))
    lower, upper = np.zeros(sampling.vocab_size), np.full(sampling.vocab_size, beyond * (1.0 + _ROUNDING))
    for row, weight, cap in zip(rows, weights, caps, strict=True):
        for token, value in row.logprobs.items():
            if token < sampling.vocab_size:
                prob = weight * math.exp(value)
                lower[token] += prob
                upper[token] += prob - weight * cap
    told = np.flatnonzero(lower).astype(np.int32)
    if not len(told):
        return APPROXIMATE
    if params.temperature == 0.0:
        winner = int(told[int(np.argmax(lower[told]))])
        rivals = np.flatnonzero(upper > lower[winner])
    else:
        scores = np.log(lower[told]) + gumbel(params.seed, sampling.position, told)
        winner = int(told[int(np.argmax(scores))])
        all_ids = token_ids(sampling.vocab_size)
        rivals = contenders(params.seed, sampling.position, all_ids, upper, float(scores.max()))
    unsure = [int(token) for token in rivals if any(token not in row.logprobs for row in rows)]
    if unsure == [winner] or not unsure:
        return EXACT
    return _asking(sorted({*unsure, winner}))


def head_of(
    rows: Sequence[ToldRow], dists: Sequence[Dist], log_weights: Sequence[float], sampling: RowSampling
) -> RowHead:
    """Head of the mixture of branches: the ids that are told in all of them, with bounds of the others.

    dists: of each branch, dense, processed.
    """
    params, size = sampling.params, sampling.vocab_size
    exponent = 1.0 if params.temperature == 0.0 else 1.0 / params.temperature
    upper, known = np.zeros(size), np.ones(size, dtype=np.bool_)
    for row, dist, weight in zip(rows, dists, softmax(list(log_weights)), strict=True):
        ids = row.ids()
        told = np.zeros(size, dtype=np.bool_)
        told[ids[ids < size]] = True
        part = dist.probs.copy()
        if not row.is_whole:
            best = max(row.logprobs, key=lambda token: dist.prob(token))
            cap = dist.prob(best) * math.exp((row.bound - row.logprobs[best]) * exponent)
            part[~told] = np.where(part[~told] > 0.0, cap, 0.0)
        upper += weight * part
        known &= told
    kept = np.flatnonzero(known)
    with np.errstate(divide="ignore"):
        reach = np.log(upper)
    if params.temperature > 0.0:
        reach += gumbel(params.seed, sampling.position, token_ids(size))
    probs = upper[kept]  # of these it is the value itself
    others = np.flatnonzero(~known & (upper > 0.0))
    order = np.argsort(-reach[kept], kind="stable")
    max_score = float(reach[others].max()) if len(others) else -math.inf
    max_prob = float(upper[others].max()) if len(others) else 0.0
    return RowHead(Dist.head(kept, probs), order, reach[kept][order], max_score, max_prob)
