"""Exactness tests have no false positives: an exact token is the token for every possible missing mass."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.aggregation.aggregators import LAST_LEVEL, OwnDist, PeerDist, make_aggregator
from paceline.core.aggregation.exactness import Ranking, TruncatedRow, sample_is_exact, settled_token
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, best_indices, gumbel
from paceline.core.sampling.sampler import (
    HEAD_BY_PROB,
    RowHead,
    SamplingParams,
    filter_top,
    row_head,
    sample,
    top_by_score,
)
from paceline.core.side import SIDES, Side, other
from paceline.wire.codec import decode_head, encode_head
from tests.core.dists import from_logits
from tests.depth import DEPTH

VOCAB = 8


def head_by_score(dist: Dist, params: SamplingParams, position: int, k: int) -> Dist:
    """The first k ids of `top_by_score`, on which the target at this position most likely depends.

    Without top-k, top-p and min-p they include the side's draft, `sample(dist)`.
    """
    return dist if len(dist.ids) <= k else dist.kept_at(np.sort(top_by_score(dist, params, position, k)))


def random_row(generator: np.random.Generator, spread: float) -> np.ndarray:
    return from_logits(generator.normal(size=VOCAB) * spread).probs


def completions(generator: np.random.Generator, head: Dist, tries: int) -> list[np.ndarray]:
    """Rows that `head` could be the head of: extreme and random distributions of the tail below the least kept id."""
    cap = float(head.probs.min())
    off = [token for token in range(VOCAB) if token not in head.ids]
    made = []
    for _ in range(tries):
        row, tail = np.zeros(VOCAB), head.tail
        row[head.ids] = head.probs
        for token in generator.permutation(off):
            share = min(tail, cap) * (1.0 if generator.random() < 0.7 else generator.random())
            row[token] = share
            tail -= share
        for token in off:  # the remaining mass goes to ids below the cap
            share = min(tail, cap - row[token])
            row[token] += share
            tail -= share
        if tail < 1e-12:
            made.append(row)
    return made


def truth(exact: np.ndarray, row: np.ndarray, weight: float, params: SamplingParams, position: int) -> int:
    mixed = mix_weighted([Dist.dense(exact), Dist.dense(row)], [1 - weight, weight])
    return sample(filter_top(mixed, params), params, position)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.3),
        SamplingParams(top_k=4, top_p=0.7, min_p=0.1),
    ],
    ids=["greedy", "plain", "top_p", "top_k", "min_p", "all"],
)
def test_an_exact_token_is_the_token_for_every_possible_tail(params: SamplingParams) -> None:
    generator = np.random.default_rng(5)
    num_exact = 0
    for position in range(150):
        spread = generator.choice([0.5, 1.5, 4.0])
        exact, row = random_row(generator, spread), random_row(generator, spread)
        kept = np.sort(best_indices(row, int(generator.integers(1, VOCAB))))
        head, weight = Dist.dense(row).kept_at(kept), float(generator.random())
        if not sample_is_exact(Dist.dense(exact), TruncatedRow(head, weight), params, position):
            continue
        num_exact += 1
        mixed = mix_weighted([Dist.dense(exact), head], [1 - weight, weight])
        token = sample(filter_top(mixed, params), params, position)
        assert all(
            truth(exact, candidate, weight, params, position) == token
            for candidate in [row, *completions(generator, head, 8)]
        )
    assert num_exact > 40, "a test that is hardly ever positive is useless"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounded_probabilities_are_allowed_for(temperature: float) -> None:
    generator = np.random.default_rng(6)
    params, num_exact = SamplingParams(temperature=temperature), 0
    for position in range(200):
        exact, row = random_row(generator, 1.0), random_row(generator, 1.0)
        rounding = 0.05
        kept = np.sort(best_indices(row, 5))
        noisy = row[kept] * generator.uniform(1 / (1 + rounding), 1, size=5)
        head = Dist(kept.astype(np.int32), noisy, max(0.0, 1.0 - float(noisy.sum())))
        if sample_is_exact(Dist.dense(exact), TruncatedRow(head, 0.5, rounding), params, position):
            num_exact += 1
            mixed = mix_weighted([Dist.dense(exact), head], [0.5, 0.5])
            assert truth(exact, row, 0.5, params, position) == sample(mixed, params, position)
    assert num_exact > 60


@pytest.mark.parametrize("params", [SamplingParams(seed=3), SamplingParams(seed=3, top_p=0.7, min_p=0.05)])
def test_a_head_ranked_by_score_has_no_false_positives(params: SamplingParams) -> None:
    """Tries only tails in which no missing id outranks the last of the head."""
    generator = np.random.default_rng(8)
    num_exact = 0
    for position in range(120):
        exact, row = random_row(generator, 1.5), random_row(generator, 1.5)
        dist, weight = Dist.dense(row), float(generator.random())
        head = head_by_score(dist, params, position, int(generator.integers(1, VOCAB)))
        assert sample(dist, params, position) in head.ids
        truncated = TruncatedRow(head, weight, ranking="score")
        if not sample_is_exact(Dist.dense(exact), truncated, params, position):
            continue
        num_exact += 1
        mixed = mix_weighted([Dist.dense(exact), head], [1 - weight, weight])
        token = sample(filter_top(mixed, params), params, position)
        assert truth(exact, row, weight, params, position) == token
        for _ in range(10):
            kept = np.isin(np.arange(VOCAB), head.ids)
            drawn = np.where(kept, row, generator.random(VOCAB) ** 3)
            drawn[~kept] *= head.tail / max(drawn[~kept].sum(), 1e-300)
            if np.array_equal(head_by_score(Dist.dense(drawn), params, position, len(head.ids)).ids, head.ids):
                assert truth(exact, drawn, weight, params, position) == token
    assert num_exact > 40


def test_ids_beyond_the_exact_row_or_a_row_with_a_tail_are_never_exact() -> None:
    exact = Dist.dense(np.array([0.9, 0.1]))
    beyond = Dist(np.array([0, 5], dtype=np.int32), np.array([0.9, 0.05]), 0.05)
    assert not sample_is_exact(exact, TruncatedRow(beyond, 0.1), SamplingParams(temperature=0.0), 0)
    cut = Dist(np.array([0], dtype=np.int32), np.array([0.9]), 0.1)
    assert not sample_is_exact(cut, TruncatedRow(cut, 0.5), SamplingParams(), 0)


@pytest.mark.parametrize(("ranking", "kept", "least"), [("probability", 512, 12), ("score", 16, 12)])
def test_a_small_payload_of_a_large_vocabulary_is_mostly_exact(ranking: Ranking, kept: int, least: int) -> None:
    generator = np.random.default_rng(7)
    num_exact, params = 0, SamplingParams(seed=1)
    for position in range(20):
        scores = generator.normal(size=30_000)
        ours, theirs = (from_logits((scores + generator.normal(size=30_000) * 0.3) * 6.0) for _ in range(2))
        by_score = head_by_score(theirs, params, position, kept)
        head = by_score if ranking == "score" else filter_top(theirs, SamplingParams(top_k=kept))
        num_exact += sample_is_exact(ours, TruncatedRow(head, 0.5, ranking=ranking), params, position)
    assert num_exact >= least


@pytest.mark.parametrize("params", [SamplingParams(seed=4), SamplingParams(temperature=0.0)], ids=["sampled", "greedy"])
def test_the_ranking_of_a_large_vocabulary_is_that_of_all_scores(params: SamplingParams) -> None:
    generator = np.random.default_rng(11)
    for position, spread in enumerate([0.5, 2.0, 6.0, 40.0]):
        dist = from_logits(generator.normal(size=20_000) * spread)
        noise = gumbel(params.seed, position, dist.ids) if params.temperature else 0.0
        order = np.argsort(-(np.log(dist.probs) + noise), kind="stable")
        for k in (1, 24, 256, 2000):
            assert np.array_equal(top_by_score(dist, params, position, k), order[:k])
    sparse = Dist.dense(np.array([0.0, 1.0, 0.0]))
    assert top_by_score(sparse, params, 0, 2).tolist() == [1, 0], "ids of probability 0 come last"


# ---- two heads settle a token only where it is that of the whole rows, and do where rows are like a model's ---------
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
    """Each level by itself: none may decide otherwise, whichever side decides; and only heads are read at first. The
    same of rows that are known as a whole, and where the target's distribution is needed."""
    params, rng = SAMPLINGS[name], np.random.default_rng(vocab)
    for position in range(30 * DEPTH):
        heads, needs_dists = ((True, False), (False, False), (False, True))[position % 3]
        aggregator = make_aggregator("mixture", params, needs_dists=needs_dists, vocab_size=vocab)
        dists = rows(rng, vocab, kind)
        cloud = float(rng.choice([0.03, 0.5, 0.8]))
        mixed = mix_weighted(list(dists), [cloud, 1.0 - cloud])
        truth = sample(filter_top(mixed, params), params, position)
        weights: dict[Side, float] = {"cloud": cloud, "device": 1.0 - cloud}
        owns = [rounded(rng, own_of(dist, params, position)) if heads else OwnDist.of(dist) for dist in dists]
        for side, own, peer in zip(SIDES, owns, owns[::-1], strict=True):
            for level in range(LAST_LEVEL + 1):
                sent = aggregator.to_wire(other(side), peer, position, level)
                assert sent.head is not None
                head = decode_head(encode_head(sent.head, precise=level > 0), vocab)
                theirs = PeerDist(sent.token, head, level)
                for from_heads in (True, False):
                    target = aggregator.decide(side, own, theirs, weights, position, from_heads=from_heads)
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
        truncated = TruncatedRow(head, 0.5, 2.0**-9, "probability" if name == "greedy" else "score")
        token = settled_token(own, truncated, params, position)
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
