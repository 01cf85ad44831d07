"""The sampler law on rows that no model should make, and under parameters that no client should ask for.

Logits that are equal, nearly equal, of one id alone or hundreds of nats apart; temperatures near 0, penalties and
biases that revive ids to which the reference gives no probability, filters that keep one id.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from paceline.core.aggregation.weights import BranchMixture, sample_mixed_rows
from paceline.core.sampling.sampler import HEAD_ERROR, RowSampling, SamplingParams, sample_row
from paceline.engine.base import SampleRequest
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.sampling.sampler import DeviceLogits, DeviceSampler
from paceline.engine.tensors import dists
from tests.engine.sampling.test_batch_sampler import peaked, tied

Shape = tuple[int, int]
Rng = np.random.Generator


def nearly_tied(rng: Rng, shape: Shape) -> np.ndarray:
    return tied(rng, shape) + rng.normal(size=shape) * rng.choice([1e-7, 1e-6, 1e-5], size=(shape[0], 1))


def all_equal(rng: Rng, shape: Shape) -> np.ndarray:
    return np.full(shape, rng.normal() * 10)


def of_one_or_two_ids(rng: Rng, shape: Shape) -> np.ndarray:
    logits = np.full(shape, -np.inf)
    for row in logits:
        row[rng.integers(0, shape[1], size=int(rng.integers(1, 3)))] = rng.normal() * 20
    return logits


def far_apart(rng: Rng, shape: Shape) -> np.ndarray:
    return -rng.exponential(100, size=shape)


def huge(rng: Rng, shape: Shape) -> np.ndarray:
    return rng.normal(size=shape) * 1e4


def coarse(rng: Rng, shape: Shape) -> np.ndarray:
    """As of a model in bfloat16."""
    return np.asarray(torch.from_numpy(peaked(rng, shape)).bfloat16().double().numpy())


LOGITS: dict[str, Callable[[Rng, Shape], np.ndarray]] = {
    each.__name__: each for each in (nearly_tied, all_equal, of_one_or_two_ids, far_apart, huge, coarse)
}


def random_row(rng: Rng, vocab: int) -> RowSampling:
    def pick(*values: float) -> float:
        return float(rng.choice(values))

    allowed = None
    if rng.random() < 0.2:
        allowed = rng.random(vocab) < pick(0.5, 0.02)
        allowed[int(rng.integers(0, vocab))] = True
    biased = rng.integers(0, vocab, size=3) if rng.random() < 0.3 else ()
    params = SamplingParams(
        temperature=pick(0.0, 1e-5, 0.001, 0.01, 0.3, 1.0, 1.0, 2.0),
        top_p=pick(1.0, 1.0, 0.9, 0.01, 1e-6, 0.0),
        top_k=int(pick(0, 0, 1, 20, vocab - 1, vocab + 5)),
        min_p=pick(0.0, 0.0, 0.05, 1.0),
        presence_penalty=pick(0.0, 0.0, -2.0),
        frequency_penalty=pick(0.0, 0.0, 2.0),
        repetition_penalty=pick(1.0, 1.0, 1.2, 10.0, 0.1),
        logit_bias={int(token): pick(-100.0, 2.0, 100.0) for token in biased},
        seed=int(rng.integers(-(2**62), 2**62)),
    )
    counts = {int(token): int(rng.integers(1, 4)) for token in rng.integers(0, vocab, size=20)}
    return RowSampling(params, int(rng.integers(0, 5000)), vocab, counts, None, allowed, int(pick(0, 8)))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kind", LOGITS)
def test_every_row_has_the_token_of_the_reference(kind: str) -> None:
    rng = np.random.default_rng(1)
    for vocab in (5, 65, 257, 257, 2048):
        logits = torch.from_numpy(LOGITS[kind](rng, (150, vocab))).float()
        rows = [random_row(rng, vocab) for _ in range(len(logits))]
        found = BatchSampler().sample(logits, rows)
        expected = [sample_row(dist, row) for dist, row in zip(dists(logits), rows, strict=True)]
        for row, one, other in zip(rows, found, expected, strict=True):
            assert one.token == other.token, (vocab, row)


def random_request(rng: Rng, kind: str, vocab: int) -> SampleRequest:
    """A tree of up to 6 rows on 2 branches; its heads are wanted too."""
    count = int(rng.integers(1, 7))
    one = random_row(rng, vocab)
    rows = tuple(
        msgspec.structs.replace(one, position=5 + row, allowed=one.allowed if row % 2 else None) for row in range(count)
    )
    base = LOGITS[kind](rng, (count, vocab))
    scores = [torch.from_numpy(base + rng.normal(size=base.shape) * noise).float() for noise in (0.0, 0.2)]
    mixture = BranchMixture(
        tuple(rng.normal(size=2).tolist()),
        tuple(tuple(rng.normal(size=2).tolist()) for _ in range(count)),
        True,
        (-1, *(int(rng.integers(-1, row)) for row in range(1, count))),
        tuple(int(token) for token in rng.integers(0, vocab, size=count)),
        (None, None),
        True,
    )
    return SampleRequest(tuple((DeviceLogits(each, 0, count),) for each in scores), rows, mixture)


@pytest.mark.parametrize("kind", LOGITS)
def test_every_mixed_row_has_the_token_and_a_head_of_the_reference(kind: str) -> None:
    rng = np.random.default_rng(2)
    for vocab in (5, 65, 257, 2048):
        for _ in range(20):
            request = random_request(rng, kind, vocab)
            assert request.mixture is not None
            branches = [[dist for part in parts for dist in part.dists()] for parts in request.branches]
            expected = sample_mixed_rows(branches, request.rows, request.mixture)
            (found,) = DeviceSampler()([request])
            for row, one, other in zip(request.rows, found, expected, strict=True):
                assert one.token == other.token, (vocab, row)
                head, truth = one.head, other.head
                assert truth is not None
                if head is None or kind in ("huge", "far_apart"):  # of those, 0.01 % is less than float32 can tell
                    continue
                _, at, there = np.intersect1d(head.dist.ids, truth.dist.ids, return_indices=True)
                np.testing.assert_allclose(
                    head.dist.probs[at], truth.dist.probs[there], rtol=2 * HEAD_ERROR, atol=1e-12, err_msg=str(row)
                )
