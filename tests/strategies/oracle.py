"""What a strategy's text must be, computed the plain way: synchronously, one position at a time, no speculation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from paceline.core.aggregation.aggregators import LAST_LEVEL, AggregatorName, OwnDist, make_aggregator
from paceline.core.aggregation.weights import (
    decayed_evidence,
    dequantize_score,
    evidence_head,
    expected_evidence,
    log_weight,
    mix,
    mix_weighted,
    quantize_score,
    side_weights,
)
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist, uniform
from paceline.core.sampling.sampler import Mask, SamplingParams, apply_mask, filter_top, process_logits, sample
from paceline.core.side import SIDES, Side
from paceline.engine.base import Engine
from paceline.strategies.base import Branch

_KNOWN: dict[tuple[object, ...], tuple[Dist, float | None]] = {}


def side_dist(
    engine: Engine,
    branches: Sequence[Branch],
    prefix: Sequence[int],
    sampling: SamplingParams,
    *,
    rescoring: bool = False,
    mask: Mask | None = None,
) -> tuple[Dist, float | None]:
    """One side's mixture after `prefix` and its log h, from a fresh prefill of every branch. Remembered."""
    key = (engine.info.fingerprint, tuple(branches), tuple(prefix), repr(sampling), rescoring, mask)
    if key in _KNOWN:
        return _KNOWN[key]
    dists, heads, scores = [], [], []
    for index, branch in enumerate(branches):
        seq = SeqId(1_000_000 + index)
        wanted = len(prefix) + 1 if rescoring else 1
        rows = engine.forward(Batch((Segment(seq, 0, (*branch.prompt, *prefix), None, wanted),))).dists[0]
        engine.release(seq)
        if mask is not None:
            first = len(prefix) + 1 - wanted
            rows = tuple(apply_mask(row, mask.allowed(prefix[:at])) for at, row in enumerate(rows, first))
        merit = 0.0
        for row, token in zip(rows[:-1], prefix if rescoring else (), strict=True):  # the last is the one asked for
            merit = decayed_evidence(merit, math.log(max(row.prob(token), 1e-30)))
        scores.append((branch.score or 0.0) + merit)
        heads.append(evidence_head(rows[-1]))
        dists.append(process_logits(rows[-1], sampling, Counter(prefix), np.array(branch.prompt, dtype=np.int32)))
    has_documents = any(branch.score is not None for branch in branches)
    log_h = log_weight(scores) if has_documents else None
    if log_h is not None and rescoring:
        log_h += expected_evidence(heads, scores)
    _KNOWN[key] = (
        mix(dists, scores),
        log_h if log_h is None or not rescoring else dequantize_score(quantize_score(log_h)),
    )
    return _KNOWN[key]


def continued_alone(
    engine: Engine,
    branches: Sequence[Branch],
    prefix: Sequence[int],
    sampling: SamplingParams,
    max_tokens: int,
    eos_ids: frozenset[int],
    *,
    rescoring: bool = False,
    mask: Mask | None = None,
) -> list[int]:
    """Autoregressive decoding forced over `prefix`; the whole answer, without the end token."""
    tokens = list(prefix)
    while len(tokens) < max_tokens:
        dist, _ = side_dist(engine, branches, tokens, sampling, rescoring=rescoring, mask=mask)
        dist = filter_top(dist, sampling)
        token = sample(dist, sampling, len(tokens))
        if token in eos_ids:
            break
        tokens.append(token)
    return tokens


Dists, Weights = Mapping[Side, Dist], Mapping[Side, float]


def _together(
    choose: Callable[[Dists, Weights, SamplingParams, int], int],
    engines: Mapping[Side, Engine],
    branches: Mapping[Side, Sequence[Branch]],
    sampling: SamplingParams,
    max_tokens: int,
    eos_ids: frozenset[int],
    *,
    rescoring: bool = False,
    mask: Mask | None = None,
    prefix: Sequence[int] = (),
) -> list[int]:
    """The synchronous answer of both sides, one position at a time."""
    tokens = list(prefix)
    while len(tokens) < max_tokens:
        found = {
            side: side_dist(engines[side], branches[side], tokens, sampling, rescoring=rescoring, mask=mask)
            for side in SIDES
        }
        weights = side_weights({side: log_h for side, (_, log_h) in found.items()})
        token = choose({side: dist for side, (dist, _) in found.items()}, weights, sampling, len(tokens))
        if token in eos_ids:
            break
        tokens.append(token)
    return tokens


def mixed(dists: Dists, weights: Weights, sampling: SamplingParams, position: int) -> int:
    """The mixture of both sides (DRAGON eq. 4)."""
    dist = mix_weighted([dists[side] for side in SIDES], [weights[side] for side in SIDES])
    return sample(filter_top(dist, sampling), sampling, position)


def tossed(dists: Dists, weights: Weights, sampling: SamplingParams, position: int) -> int:
    """A coin for every position says whose token it is (specs 1.6, mode B)."""
    side: Side = "cloud" if uniform(sampling.seed, position, "coin") < weights["cloud"] else "device"
    return sample(filter_top(dists[side], sampling), sampling, position)


def by_paper(dists: Dists, weights: Weights, sampling: SamplingParams, position: int) -> int:
    """Algorithm 1 with both distributions at hand; the aggregator itself is tested by tests/core."""
    rule = make_aggregator("paper", sampling, vocab_size=len(dists["device"].ids))
    share = rule.to_wire("cloud", OwnDist.of(dists["cloud"]), position, LAST_LEVEL)
    decision = rule.decide("device", OwnDist.of(dists["device"]), share, weights, position)
    assert decision is not None
    return decision.token


REFERENCES: Mapping[AggregatorName, Callable[..., list[int]]] = {
    "mixture": partial(_together, mixed),
    "coin": partial(_together, tossed),
    "paper": partial(_together, by_paper),
}
