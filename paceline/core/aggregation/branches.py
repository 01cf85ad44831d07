"""Tokens from the mixture of one side's branches: DRAGON eq. 2, with documents rescored by the text.

`sample_mixed_rows` is the definition. An engine that has the branches' logits on its device mixes and samples many rows
in one pass (`engine.sampling`) and must return the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.aggregation.weights import decayed_evidence, evidence_head, mix
from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.row import RowSampling, SampledRow, head, sample_row
from paceline.core.sampling.row_head import row_head
from paceline.core.sampling.sampler import SamplingParams, apply_mask, filter_top, process_logits, sample

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
    plain = dist.within(row.vocab_size)
    return plain if row.allowed is None else apply_mask(plain, row.allowed)
