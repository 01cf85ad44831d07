"""Bytes of a drafted token on the link, by aggregator: messages of the real codec over synthetic distributions.

Distributions over 151,936 ids, the size of Qwen's vocabulary, with a Zipf tail below a few likely tokens. One node a
message, the most expensive case: several nodes share the message's header.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from paceline.core.aggregation.aggregators import AggregatorName, OwnDist, make_aggregator
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.wire.codec import encode, encode_head
from paceline.wire.messages import Drafts
from paceline.wire.payloads import FOLLOWS, EncodedNodes, pack_nodes

VOCAB = 151_936
CASES: tuple[tuple[str, AggregatorName, SamplingParams], ...] = (
    ("mixture, top_p 0.95", "mixture", SamplingParams(top_p=0.95, seed=1)),
    ("mixture, top_p 1", "mixture", SamplingParams(seed=1)),
    ("mixture, temperature 0", "mixture", SamplingParams(temperature=0.0)),
    ("coin", "coin", SamplingParams(seed=1)),
)


def synthetic_dists(count: int, seed: int = 0) -> Iterator[Dist]:
    """Zipf exponents of 1 to 3 over shuffled ids; every other one has most of its mass on one to four tokens."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        probs = np.arange(1, VOCAB + 1) ** -rng.uniform(1.0, 3.0)
        rng.shuffle(probs)
        probs /= probs.sum()
        if number % 2:
            likely = rng.choice(VOCAB, rng.integers(1, 5), replace=False)
            probs *= 0.2
            probs[likely] += 0.8 * rng.dirichlet(np.ones(len(likely)))
        yield Dist.dense(probs / probs.sum())


def rows(count: int) -> list[dict[str, object]]:
    """One row a case, over the first `count` tokens of an answer: median and 90th percentile."""
    table: list[dict[str, object]] = []
    for name, aggregator, sampling in CASES:
        sizes = sorted(
            _size(aggregator, sampling, dist, position) for position, dist in enumerate(synthetic_dists(count))
        )
        table.append(
            {"way": name, "bytes": float(statistics.median(sizes)), "bytes_p90": float(sizes[int(0.9 * len(sizes))])}
        )
    return table


def _size(name: AggregatorName, sampling: SamplingParams, dist: Dist, position: int) -> int:
    """Bytes of a message with one node, not the first of its session."""
    share = make_aggregator(name, sampling, vocab_size=VOCAB).to_wire("cloud", OwnDist.of(dist), position)
    first = 4 * (position + 3)
    coin = share.head is None
    nodes = EncodedNodes(
        position=None,
        level=0,
        first=first,
        parents=(first - 1,),
        tokens=(FOLLOWS if coin else share.token,),
        choices=(share.token,) if coin else None,
    )
    packed = pack_nodes(nodes)
    return len(encode(Drafts(7, 0, packed, [] if share.head is None else [encode_head(share.head, precise=False)])))
