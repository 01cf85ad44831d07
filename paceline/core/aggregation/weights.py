"""Mixtures of next-token distributions over documents and over sides: DRAGON, equations 2 and 4.

A side's mixture weighs its documents with softmax(score); the two sides' weights follow from log h, the logsumexp of
the scores on each side, so that the result is one softmax over all documents of both sides. `exactness` tests whether a
truncated row suffices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from paceline.core.sampling.dist import Dist, IdArray, ProbArray, best_indices
from paceline.core.sampling.sampler import (
    RowSampling,
    SampledRow,
    SamplingParams,
    apply_mask,
    filter_top,
    head,
    process_logits,
    row_head,
    sample,
    sample_row,
)

SideName = TypeVar("SideName", bound=str)


def log_weight(scores: Sequence[float]) -> float:
    """log h, the logsumexp of the documents' scores. Not normalised per side, which would make all sides equal.

    Raises ValueError for no scores: a side without documents has no log h.
    """
    if not scores:
        raise ValueError("a side without documents has no weight")
    best = max(scores)
    if math.isinf(best):
        return best
    return best + math.log(math.fsum(math.exp(score - best) for score in scores))


def softmax(log_weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1; equal weights if all are -inf."""
    best = max(log_weights)
    if best == -math.inf:
        return [1.0 / len(log_weights)] * len(log_weights)
    powers = [math.exp(weight - best) for weight in log_weights]
    total = math.fsum(powers)
    return [power / total for power in powers]


# Scale, decay per token and bound in nats of a token's evidence: chosen by measurement, see bench/LOG.md.
EVIDENCE_SCALE, EVIDENCE_DECAY, MAX_SURPRISAL = 1.0, 0.5, 5.0
NEGLIGIBLE_PROB = 0.5 * math.exp(-MAX_SURPRISAL)  # probabilities up to here are equal evidence, with room for rounding


def decayed_evidence(before: float, log_probability: float) -> float:
    """The term added to a document's score after a token to which its branch gave this log-probability.

    DRAGON rescores documents while the text grows. How well a branch has predicted the text is better evidence than
    another search: it is free, and follows the text token by token. Older tokens count less, otherwise one document
    would soon dominate for good (Bayes' rule for a text that is all of one document). No token counts more than
    `MAX_SURPRISAL` nats, so that a document that lacks one fact may still contribute the next.
    """
    return EVIDENCE_DECAY * before + EVIDENCE_SCALE * max(log_probability, -MAX_SURPRISAL)


def expected_evidence(heads: Sequence[Dist], log_weights: Sequence[float]) -> float:
    """The evidence that a side's documents expect of the next token, by their weights: -5 to 0 nats, near the negative
    entropy where few tokens are likely. A side that is sure, as where its documents hold what comes next, counts more
    for that token than one that could go on in many ways. heads: `evidence_head` of each branch; log_weights: of each,
    before the softmax.

    Tokens count from `MAX_SURPRISAL` nats on and not by a threshold, so that rounding changes it little.
    """
    if len(heads) == 1:
        return _expected(heads[0].probs)
    return sum(share * _expected(dist.probs) for share, dist in zip(softmax(log_weights), heads, strict=True))


def _expected(likely: ProbArray) -> float:
    nats = np.log(likely)
    nats += MAX_SURPRISAL
    return float(likely @ np.maximum(nats, 0.0, out=nats)) - MAX_SURPRISAL


def evidence_head(dist: Dist) -> Dist:
    """The tokens that `decayed_evidence` can depend on: some hundred at most, in place of a whole vocabulary."""
    return dist.kept(dist.probs > NEGLIGIBLE_PROB)


SCORE_STEPS = 16  # per nat: a side's weight is off by 0.8 % at most, and log h takes a byte


def quantize_score(score: float) -> int:
    """The score in steps of 1/16, as the wire carries it. Both sides must weigh with the rounded number."""
    return round(score * SCORE_STEPS)


def dequantize_score(code: int) -> float:
    return code / SCORE_STEPS


def rescored_log_weight(scores: Sequence[float], heads: Sequence[Dist]) -> float:
    """log h after a prefix, as both sides weigh with it. scores: of the documents, with their evidence; heads: as of
    `expected_evidence`."""
    return dequantize_score(quantize_score(log_weight(scores) + expected_evidence(heads, scores)))


def side_weights(log_h: Mapping[SideName, float | None]) -> dict[SideName, float]:
    """eta of each side, summing to 1. None: a side without documents, weight 0; all None: equal weights."""
    if not log_h:
        return {}
    values = [-math.inf if value is None else value for value in log_h.values()]
    return dict(zip(log_h, softmax(values), strict=True))


def mix(dists: Sequence[Dist], log_weights: Sequence[float]) -> Dist:
    """The mixture with weights softmax(log_weights). A single distribution is returned as it is.

    Distributions may be sparse: a missing token counts as 0, and the tail is the mixture of the tails. Raises
    ValueError if the lengths differ or are 0.
    """
    if not dists or len(dists) != len(log_weights):
        raise ValueError(f"{len(dists)} distributions and {len(log_weights)} weights")
    if len(dists) == 1:
        return dists[0]
    return mix_weighted(dists, softmax(log_weights))


def mix_heads(dists: Sequence[Dist], log_weights: Sequence[float], k: int) -> Dist:
    """The head of the mixture: the tokens that are among the k best of any of its parts.

    Cheaper than `mix` where only the first tokens are needed: searches each distribution, but does not add them up. For
    dense distributions of one vocabulary only.
    """
    ids = np.unique(np.concatenate([best_indices(dist.probs, k) for dist in dists])).astype(np.int32)
    probs: ProbArray = np.zeros(len(ids))
    for dist, weight in zip(dists, softmax(log_weights), strict=True):
        probs += weight * dist.probs[ids]
    return Dist.head(ids, probs)


def mix_weighted(dists: Sequence[Dist], weights: Sequence[float]) -> Dist:
    """The mixture with weights that sum to 1. A distribution of weight 1 is returned as it is."""
    parts = [(dist, weight) for dist, weight in zip(dists, weights, strict=True) if weight > 0.0]
    if len(parts) == 1:
        return parts[0][0]
    tail = math.fsum(weight * dist.tail for dist, weight in parts)
    widest = max((dist for dist, _ in parts), key=lambda dist: len(dist.ids))
    if widest.leading and all(not len(d.ids) or int(d.ids[-1]) < len(widest.ids) for d, _ in parts):
        ids = widest.ids  # each id is its own index: no search, no sort
    else:
        ids = np.unique(np.concatenate([dist.ids for dist, _ in parts]))
    probs: ProbArray = np.zeros(len(ids))
    for dist, weight in parts:
        if len(dist.ids) == len(ids):
            probs += weight * dist.probs
        else:
            probs[np.searchsorted(ids, dist.ids)] += weight * dist.probs
    return Dist(ids, probs, tail)


# Tokens from the mixture of one side's branches: DRAGON eq. 2, with documents rescored by the text.
#
# `sample_mixed_rows` is the definition. An engine that has the branches' logits on its device mixes and samples many
# rows in one pass (`engine.sampling`) and must return the same tokens.


MIN_PROB = 1e-30  # in place of a probability of 0, whose logarithm is not finite

Evidence = tuple[float, ...]  # of each branch's document: what the text so far adds to its score


@dataclass(frozen=True, slots=True, eq=False)
class BranchMixture:
    """Rows that every branch has, in the same order, parents first."""

    log_weights: tuple[float, ...]  # (branches,) R of each document, 0 without one
    evidence: tuple[Evidence, ...]  # (rows, branches) after the row's prefix; used of rows with parent -1
    rescoring: bool  # scores of documents follow the text
    parents: tuple[int, ...]  # (rows,) index of the row's parent among the rows; -1: computed earlier, or none
    tokens: tuple[int, ...]  # (rows,) the row's own token; not used of rows with parent -1
    prompts: tuple[IdArray | None, ...]  # (branches,) as in `RowSampling`
    heads: bool = False  # heads of the rows are wanted, and their distributions to be read later


def evidence_after(before: Evidence, probs: Sequence[float]) -> Evidence:
    """Evidence after one more token. probs: the token's probability in each branch, under the constraint."""
    return tuple(
        decayed_evidence(each, math.log(max(prob, MIN_PROB))) for each, prob in zip(before, probs, strict=True)
    )


def row_evidence(mixture: BranchMixture, row: int, known: Sequence[Evidence], probs: Sequence[float]) -> Evidence:
    """Evidence of a row. known: of the rows before it. probs: the row's token's probabilities after its parent."""
    parent = mixture.parents[row]
    if parent < 0:
        return mixture.evidence[row]
    return evidence_after(known[parent], probs) if mixture.rescoring else known[parent]


def sample_mixed_rows(
    branches: Sequence[Sequence[Dist]], rows: Sequence[RowSampling], mixture: BranchMixture
) -> tuple[SampledRow, ...]:
    """The reference. branches: of each branch its rows' distributions, dense, at temperature 1.

    The last branch may have more rows, which come first: those of its prompt's end, sampled by themselves.
    """
    extra = len(rows) - len(mixture.tokens)
    found = [sample_row(dist, row) for dist, row in zip(branches[-1][:extra], rows, strict=False)]
    allowed: list[list[Dist]] = []
    evidence: list[Evidence] = []
    for index, row in enumerate(rows[extra:]):
        dists = [dists[len(dists) - len(mixture.tokens) + index] for dists in branches]
        allowed.append([masked(dist, row) for dist in dists])
        parent, own = mixture.parents[index], mixture.tokens[index]
        probs = [dist.prob(own) for dist in allowed[parent]] if parent >= 0 else ()
        evidence.append(row_evidence(mixture, index, evidence, probs))
        found.append(sample_mixed_row(dists, row, mixture, evidence[-1]))
    return tuple(found)


def sample_mixed_row(dists: Sequence[Dist], row: RowSampling, mixture: BranchMixture, evidence: Evidence) -> SampledRow:
    """One row, whose evidence is known. dists: of each branch."""
    plain = [dist.within(row.vocab_size) for dist in dists]
    allowed = [masked(dist, row) for dist in plain]
    log_weights = row_log_weights(mixture.log_weights, evidence)
    mixed = mix_processed(allowed, row.params, row.counts, mixture.prompts, log_weights)
    token = sample(filter_top(mixed, row.params), row.params, row.position)
    top = head(mix(plain, log_weights), row.num_top) if row.num_top else None
    probs = tuple(dist.prob(token) for dist in allowed)
    if not mixture.heads:
        return SampledRow(token, top, probs)
    found = tuple(map(evidence_head, allowed)) if mixture.rescoring else ()
    return SampledRow(token, top, probs, row_head(mixed, row.params, row.position), found, lambda: tuple(dists))


def row_log_weights(log_weights: Sequence[float], evidence: Evidence) -> list[float]:
    """(branches,) weights of a row's branches before the softmax."""
    return [weight + added for weight, added in zip(log_weights, evidence, strict=True)]


def mix_processed(
    masked: Sequence[Dist],
    params: SamplingParams,
    counts: Mapping[int, int],
    prompts: Sequence[IdArray | None],
    log_weights: Sequence[float],
) -> Dist:
    """The mixture of the branches' distributions under penalties, bias and temperature. prompts: of each branch."""
    return mix(
        [process_logits(dist, params, counts, prompt) for dist, prompt in zip(masked, prompts, strict=True)],
        log_weights,
    )


def masked(dist: Dist, row: RowSampling) -> Dist:
    """A branch's distribution under the row's constraint."""
    return apply_mask(dist.within(row.vocab_size), row.allowed)


# Which of a side's documents decided a token: those whose share of its probability in the mixture is a large one.
#
# A citation needs a document that decided a token against another one. Where all give a token about as much, as with
# most words of any sentence, it tells nothing of any of them. Penalties and temperature are left out.


LEAST_SHARE: Final = 0.5  # of the greatest share: below, a document has been outvoted


def deciders(log_weights: Sequence[float], probs: Sequence[float]) -> frozenset[int] | None:
    """Indices of the branches that decided a token; None where all did, or the one there is.

    log_weights: (branches,) before the softmax; probs: (branches,) the token's in each.
    """
    if len(probs) < 2:
        return None
    top = max(log_weights)
    shares = [math.exp(weight - top) * prob for weight, prob in zip(log_weights, probs, strict=True)]
    least = LEAST_SHARE * max(shares)
    found = frozenset(index for index, share in enumerate(shares) if share >= least)
    return None if len(found) == len(shares) else found
