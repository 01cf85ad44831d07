"""Two heads settle a token only where it is that of the whole rows, and they do where rows are like a model's."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.aggregation.aggregators import LAST_LEVEL, OwnDist, PeerDist, make_aggregator
from paceline.core.aggregation.exactness import settled_token
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, gumbel
from paceline.core.sampling.sampler import HEAD_BY_PROB, RowHead, SamplingParams, filter_top, row_head, sample
from paceline.wire.codec import decode_head, encode_head
from tests.core.dists import from_logits
from tests.depth import DEPTH

SAMPLINGS = {
    "plain": SamplingParams(seed=3),
    "top_p": SamplingParams(seed=3, top_p=0.9),
    "top_k": SamplingParams(seed=3, top_k=5),
    "min_p": SamplingParams(seed=3, min_p=0.1),
    "all": SamplingParams(seed=3, top_p=0.9, top_k=20, min_p=0.02, temperature=0.7),
    "greedy": SamplingParams(seed=3, temperature=0.0, top_p=0.5),
}


def rows(rng: np.random.Generator, vocab: int, kind: str) -> tuple[Dist, Dist]:
    if kind == "flat":
        base, apart = rng.normal(size=vocab) * 0.3, 0.3
    elif kind == "spread":
        base, apart = rng.normal(size=vocab) * 2.5, 1.0
    else:  # as a model's: Zipf's law with a clear winner
        base, apart = -rng.uniform(1.1, 2.5) * np.log(rng.permutation(vocab) + 1.0), 0.7
        base[int(np.argmax(base))] += rng.uniform(0.0, 4.0)
    first, second = (from_logits(base + rng.normal(size=vocab) * apart) for _ in range(2))
    return first, second


def rounded(rng: np.random.Generator, own: OwnDist) -> OwnDist:
    """The head as an engine computes it in float32, at its worst."""
    head = own.head
    assert head is not None
    probs = head.dist.probs * (1.0 + rng.uniform(-2e-6, 2e-6, size=len(head.dist.probs)))
    dist = Dist(head.dist.ids, probs, max(1.0 - float(probs.sum()), 0.0))
    return OwnDist(
        RowHead(dist, head.best, head.scores, head.max_score, head.max_prob),
        own.token(SAMPLINGS["plain"], 0),
        lambda: own.whole,
    )


def own_of(dist: Dist, params: SamplingParams, position: int) -> OwnDist:
    token = sample(filter_top(dist, params), params, position)
    return OwnDist(row_head(dist, params, position), token, lambda: dist)


@pytest.mark.parametrize("kind", ["flat", "spread", "model"])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("vocab", [40, 300, 2000])
def test_targets_are_those_of_the_whole_rows(name: str, kind: str, vocab: int) -> None:
    """Each level by itself: none may decide otherwise, whichever side decides; and only heads are read at first."""
    params, rng = SAMPLINGS[name], np.random.default_rng(vocab)
    aggregator = make_aggregator("mixture", params, vocab_size=vocab)
    for position in range(20 * DEPTH):
        dists = rows(rng, vocab, kind)
        cloud = float(rng.choice([0.03, 0.5, 0.8]))
        mixed = mix_weighted(list(dists), [cloud, 1.0 - cloud])
        truth = sample(filter_top(mixed, params), params, position)
        weights = {"cloud": cloud, "device": 1.0 - cloud}
        owns = [rounded(rng, own_of(dist, params, position)) for dist in dists]
        for side, own, peer in (("cloud", owns[0], owns[1]), ("device", owns[1], owns[0])):
            for level in range(LAST_LEVEL + 1):
                sent = aggregator.to_wire("device" if side == "cloud" else "cloud", peer, position, level)
                assert sent.head is not None
                head = decode_head(encode_head(sent.head, precise=level > 0), vocab)
                theirs = PeerDist(sent.token, head, level)
                for from_heads in (True, False):
                    target = aggregator.decide(
                        "cloud" if side == "cloud" else "device", own, theirs, weights, position, from_heads=from_heads
                    )
                    assert target is None or target.token == truth
            assert target is not None, "the last level always decides"


@pytest.mark.parametrize(("name", "least"), [("plain", 0.9), ("top_p", 0.6), ("greedy", 0.9), ("all", 0.5)])
def test_heads_settle_most_rows_of_a_real_vocabulary(name: str, least: float) -> None:
    params, rng, settled = SAMPLINGS[name], np.random.default_rng(1), 0
    aggregator = make_aggregator("mixture", params)
    for position in range(40):
        ours, theirs = rows(rng, 30_000, "model")
        sent = aggregator.to_wire("device", own_of(theirs, params, position), position)
        assert sent.head is not None
        head = decode_head(encode_head(sent.head, precise=False), 30_000)
        own = row_head(ours, params, position)
        ranking = "probability" if name == "greedy" else "score"
        token = settled_token(own, head, params, position, weight=0.5, rounding=2.0**-9, ranking=ranking)
        settled += token is not None
    assert settled >= least * 40


def test_a_head_bounds_all_that_it_lacks() -> None:
    rng = np.random.default_rng(5)
    for name, params in SAMPLINGS.items():
        for kind in ("flat", "spread", "model"):
            dist, _ = rows(rng, 3000, kind)
            head = row_head(dist, params, 7)
            others = np.setdiff1d(dist.ids, head.dist.ids)
            assert len(head.dist.ids) >= HEAD_BY_PROB and not head.whole
            noise = 0.0 if name == "greedy" else gumbel(params.seed, 7, others)
            assert (dist.probs[others] <= head.max_prob).all()
            assert (np.log(dist.probs[others]) + noise <= head.max_score).all()
            assert head.dist.tail == pytest.approx(float(dist.probs[others].sum()))


def test_a_head_of_a_small_vocabulary_is_the_row() -> None:
    dist = from_logits(np.linspace(0.0, 3.0, 100))
    head = row_head(dist, SamplingParams(), 0)
    assert head.dist is dist and head.whole
