"""What a strategy's text must be, computed the plain way: synchronously, one position at a time, no speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from paceline.core.aggregation import log_weight, mix, mix_weighted, side_weights
from paceline.core.dist import Dist
from paceline.core.noise import uniform
from paceline.core.rules import LAST_LEVEL, RuleName, make_rule
from paceline.core.sampling import SamplingParams, choose, truncate, warp
from paceline.core.segments import Batch, Segment, SeqId
from paceline.core.sides import SIDES, Side
from paceline.engine.contract import Engine
from paceline.strategies.machine import Branch

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

    def target(tokens: list[int]) -> int:
        laws = [side_dist(engines[side], branches[side], tokens, sampling) for side in SIDES]
        return choose(truncate(mix_weighted(laws, [weights[side] for side in SIDES]), sampling), sampling, len(tokens))

    return _written(target, max_tokens, eos_ids)


def tossed(
    engines: Mapping[Side, Engine],
    branches: Mapping[Side, Sequence[Branch]],
    sampling: SamplingParams,
    max_tokens: int,
    eos_ids: frozenset[int],
) -> list[int]:
    """A coin for every position says whose token it is (specs 1.6, mode B)."""
    weights = side_weights({side: log_h(branches[side]) for side in branches})

    def target(tokens: list[int]) -> int:
        cloud = uniform(sampling.seed, len(tokens), "coin") < weights["cloud"]
        side: Side = "cloud" if cloud else "device"
        dist = side_dist(engines[side], branches[side], tokens, sampling)
        return choose(truncate(dist, sampling), sampling, len(tokens))

    return _written(target, max_tokens, eos_ids)


def by_paper(
    engines: Mapping[Side, Engine],
    branches: Mapping[Side, Sequence[Branch]],
    sampling: SamplingParams,
    max_tokens: int,
    eos_ids: frozenset[int],
) -> list[int]:
    """Algorithm 1 with both laws at hand; the rule itself is held to its law by tests/core."""
    rule = make_rule("paper", sampling, vocab_size=next(iter(engines.values())).info.vocab_size)
    weights = side_weights({side: log_h(branches[side]) for side in branches})

    def target(tokens: list[int]) -> int:
        device, cloud = (side_dist(engines[side], branches[side], tokens, sampling) for side in ("device", "cloud"))
        share = rule.share("cloud", cloud, len(tokens), LAST_LEVEL)
        decision = rule.decide("device", device, share, weights, len(tokens))
        assert decision is not None
        return decision.token

    return _written(target, max_tokens, eos_ids)


REFERENCES: Mapping[RuleName, Callable[..., list[int]]] = {"mixture": mixed, "coin": tossed, "paper": by_paper}


def _written(target: Callable[[list[int]], int], max_tokens: int, eos_ids: frozenset[int]) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_tokens and (token := target(tokens)) not in eos_ids:
        tokens.append(token)
    return tokens
