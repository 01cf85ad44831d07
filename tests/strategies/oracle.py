"""What a strategy's text must be, computed the plain way: synchronously, one position at a time, no speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.core.aggregation import log_weight, mix, mix_weighted, side_weights
from paceline.core.dist import Dist
from paceline.core.sampling import SamplingParams, choose, truncate, warp
from paceline.core.segments import Batch, Segment, SeqId
from paceline.engine.contract import Engine
from paceline.strategies.aggregate import law
from paceline.strategies.machine import Branch, Side

_KNOWN: dict[tuple[object, ...], Dist] = {}


def side_dist(engine: Engine, branches: Sequence[Branch], prefix: Sequence[int], sampling: SamplingParams) -> Dist:
    """One side's mixture after `prefix`, from a fresh prefill of every branch. Remembered: it is asked for often."""
    key = (engine.info.fingerprint, tuple(branches), tuple(prefix), repr(sampling))
    if key in _KNOWN:
        return _KNOWN[key]
    dists = []
    for index, branch in enumerate(branches):
        seq = SeqId(1_000_000 + index)
        output = engine.forward(Batch((Segment(seq, 0, (*branch.prompt, *prefix)),)))
        engine.release(seq)
        dists.append(warp(output.dists[0][-1], sampling, Counter(prefix)))
    _KNOWN[key] = mix(dists, [branch.score or 0.0 for branch in branches])
    return _KNOWN[key]


def log_h(branches: Sequence[Branch]) -> float | None:
    scores = [branch.score for branch in branches if branch.score is not None]
    return log_weight(scores) if scores else None


def continued_alone(
    engine: Engine,
    branches: Sequence[Branch],
    prefix: Sequence[int],
    sampling: SamplingParams,
    max_tokens: int,
    eos_ids: frozenset[int],
) -> list[int]:
    """Autoregressive decoding forced over `prefix`; the whole answer, without the end token."""
    tokens = list(prefix)
    while len(tokens) < max_tokens:
        dist = truncate(side_dist(engine, branches, tokens, sampling), sampling)
        token = choose(dist, sampling, len(tokens))
        if token in eos_ids:
            break
        tokens.append(token)
    return tokens


def mixed(
    engines: Mapping[Side, Engine],
    branches: Mapping[Side, Sequence[Branch]],
    sampling: SamplingParams,
    max_tokens: int,
    eos_ids: frozenset[int],
) -> list[int]:
    """The synchronous mixture of both sides (DRAGON eq. 4), one position at a time."""
    weights = side_weights({side: log_h(branches[side]) for side in branches})
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        laws = [law(side_dist(engines[side], branches[side], tokens, sampling)) for side in branches]
        final = truncate(mix_weighted(laws, [weights[side] for side in branches]), sampling)
        token = choose(final, sampling, len(tokens))
        if token in eos_ids:
            break
        tokens.append(token)
    return tokens
