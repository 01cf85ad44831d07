"""The sampler law on rows that no model should make, and under parameters that no client should ask for.

Logits that are equal, nearly equal, of one id alone or hundreds of nats apart; temperatures near 0, penalties and
biases that revive ids to which the reference gives no probability, filters that keep one id.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.sampling.sampler import HEAD_ERROR, sample_row
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.sampling.sampler import DeviceSampler
from paceline.engine.tensors import dists
from tests.engine.sampling.test_batch_sampler import Draw, Options, peaked, random_row, tied
from tests.engine.sampling.test_sampler import random_request, with_heads

Shape = tuple[int, int]
Rng = np.random.Generator
OPTIONS: Options = {
    "temperature": (0.0, 1e-5, 0.001, 0.01, 0.3, 1.0, 1.0, 2.0),
    "top_p": (1.0, 1.0, 0.9, 0.01, 1e-6, 0.0),
    "top_k": (0, 0, 1, 20, 64, 3000),
    "min_p": (0.0, 0.0, 0.05, 1.0),
    "presence_penalty": (0.0, 0.0, -2.0),
    "frequency_penalty": (0.0, 0.0, 2.0),
    "repetition_penalty": (1.0, 1.0, 1.2, 10.0, 0.1),
    "bias": (-100.0, 2.0, 100.0),
}


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


LOGITS: dict[str, Draw] = {
    each.__name__: each for each in (nearly_tied, all_equal, of_one_or_two_ids, far_apart, huge, coarse)
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kind", LOGITS)
def test_every_row_has_the_token_of_the_reference(kind: str) -> None:
    rng = np.random.default_rng(1)
    for vocab in (5, 65, 257, 2048):
        logits = torch.from_numpy(LOGITS[kind](rng, (80, vocab))).float()
        rows = [random_row(rng, vocab, OPTIONS) for _ in range(len(logits))]
        found = BatchSampler().sample(logits, rows)
        expected = [sample_row(dist, row) for dist, row in zip(dists(logits), rows, strict=True)]
        for row, one, other in zip(rows, found, expected, strict=True):
            assert one.token == other.token, (vocab, row)


@pytest.mark.parametrize("kind", LOGITS)
def test_every_mixed_row_has_the_token_and_a_head_of_the_reference(kind: str) -> None:
    rng = np.random.default_rng(2)
    for vocab in (5, 65, 257, 2048):
        requests = [with_heads(random_request(rng, LOGITS[kind], vocab, options=OPTIONS)) for _ in range(8)]
        for request, found in zip(requests, DeviceSampler()(requests), strict=True):
            for row, one, other in zip(request.rows, found, request.by_reference(), strict=True):
                assert one.token == other.token, (vocab, row)
                head, truth = one.head, other.head
                # In the last two kinds 0.01 % is less than float32 can tell.
                if head is None or truth is None or kind in ("huge", "far_apart"):
                    continue
                _, at, there = np.intersect1d(head.dist.ids, truth.dist.ids, return_indices=True)
                np.testing.assert_allclose(
                    head.dist.probs[at], truth.dist.probs[there], rtol=2 * HEAD_ERROR, atol=1e-12, err_msg=str(row)
                )
