"""The sampler law for several branches: mixed, rescored and sampled rows have the reference's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.sampling.row import RowSampling
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import SampleRequest
from paceline.engine.sampling.device_logits import DeviceLogits, DeviceSampler
from tests.engine.sampling.test_batch_sampler import LOGITS, random_row


def random_request(rng: np.random.Generator, kind: str, vocab: int, *, padding: int = 0) -> SampleRequest:
    """A tree of up to 9 rows on 2 or 3 branches; in some of them rows of the last prompt's end come first."""
    num_branches, count, extra = int(rng.integers(2, 4)), int(rng.integers(1, 10)), int(rng.integers(0, 3))
    one = random_row(rng, vocab)
    rows = tuple(
        RowSampling(
            one.params,
            5 + row,
            vocab,
            one.counts,
            None,
            one.allowed if row % 2 else None,
            int(rng.choice([0, 8])),
        )
        for row in range(count)
    )
    heads = tuple(RowSampling(SamplingParams(temperature=0.0), 0, vocab, num_top=8) for _ in range(extra))
    base = LOGITS[kind](rng, (count, vocab + padding))
    branches = []
    for branch in range(num_branches):
        values = base + rng.normal(size=base.shape) * rng.choice([0.2, 2.0])
        if branch == num_branches - 1:
            values = np.concatenate((LOGITS[kind](rng, (extra, vocab + padding)), values))
        scores = torch.from_numpy(values).float()
        cut = int(rng.integers(0, len(scores) + 1))  # a segment that the scheduler has cut
        parts = [DeviceLogits(scores, 0, cut), DeviceLogits(scores, cut, len(scores))]
        branches.append(tuple(part for part in parts if part))
    mixture = BranchMixture(
        tuple(rng.normal(size=num_branches).tolist()),
        tuple(tuple(rng.normal(size=num_branches).tolist()) for _ in range(count)),
        bool(rng.random() < 0.7),
        (-1, *(int(rng.integers(-1, row)) for row in range(1, count))),
        tuple(int(token) for token in rng.integers(0, vocab, size=count)),
        tuple(one.prompt if branch else None for branch in range(num_branches)),
    )
    return SampleRequest(tuple(branches), (*heads, *rows), mixture)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("vocab", "padding"), [(257, 0), (3000, 8)])
def test_every_row_has_the_token_of_the_reference(kind: str, vocab: int, padding: int) -> None:
    rng = np.random.default_rng(vocab)
    requests = [random_request(rng, kind, vocab, padding=padding) for _ in range(60)]
    answers = DeviceSampler()(requests)
    for request, found in zip(requests, answers, strict=True):
        expected = request.by_reference()
        assert [row.token for row in found] == [row.token for row in expected], request
        for one, other in zip(found, expected, strict=True):
            assert one.branch_probs == pytest.approx(other.branch_probs, rel=1e-4, abs=1e-12)
            assert (one.top is None) == (other.top is None)
            if one.top is not None and other.top is not None:
                assert one.top.probs.sum() == pytest.approx(other.top.probs.sum(), rel=1e-4)
                assert kind == "tied" or np.isin(one.top.ids, other.top.ids).mean() >= 0.7  # also under a constraint


def test_a_real_vocabulary() -> None:
    rng = np.random.default_rng(3)
    requests = [random_request(rng, kind, 151_936) for kind in ("peaked", "flat", "peaked")]
    answers = DeviceSampler()(requests)
    for request, found in zip(requests, answers, strict=True):
        assert [row.token for row in found] == [row.token for row in request.by_reference()]
