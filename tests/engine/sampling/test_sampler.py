"""The sampler law for several branches: mixed, rescored and sampled rows have the reference's tokens."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from paceline.core.aggregation.weights import BranchMixture, evidence_head, sample_mixed_rows
from paceline.core.sampling.dist import gumbel
from paceline.core.sampling.sampler import HEAD_ERROR, RowSampling, SamplingParams
from paceline.engine.base import SampleRequest
from paceline.engine.sampling.sampler import DeviceLogits, DeviceSampler, evidence_heads
from paceline.engine.sampling.workspace import answers_of
from tests.engine.sampling.test_batch_sampler import EXTREME, HOSTILE, LOGITS, USUAL, Draw, Options, random_row


def random_request(
    rng: np.random.Generator, logits: Draw, vocab: int, *, padding: int = 0, options: Options = USUAL
) -> SampleRequest:
    """A tree of up to 9 rows on 2 or 3 branches; in some of them rows of the last prompt's end come first."""
    num_branches, count, extra = int(rng.integers(2, 4)), int(rng.integers(1, 10)), int(rng.integers(0, 3))
    one = random_row(rng, vocab, options)
    rows = tuple(
        RowSampling(
            one.params, 5 + row, vocab, one.counts, None, one.allowed if row % 2 else None, int(rng.choice([0, 8]))
        )
        for row in range(count)
    )
    heads = tuple(RowSampling(SamplingParams(temperature=0.0), 0, vocab, num_top=8) for _ in range(extra))
    base = logits(rng, (count, vocab + padding))
    branches = []
    for branch in range(num_branches):
        values = base + rng.normal(size=base.shape) * rng.choice([0.2, 2.0])
        if branch == num_branches - 1:
            values = np.concatenate((logits(rng, (extra, vocab + padding)), values))
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
    requests = [random_request(rng, LOGITS[kind], vocab, padding=padding) for _ in range(60)]
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
    requests = [random_request(rng, LOGITS[kind], 151_936) for kind in ("peaked", "flat", "peaked")]
    answers = DeviceSampler()(requests)
    for request, found in zip(requests, answers, strict=True):
        assert [row.token for row in found] == [row.token for row in request.by_reference()]


# ---- heads: their bounds hold for the row that the reference sees, and their probabilities are its own ----
def with_heads(request: SampleRequest) -> SampleRequest:
    assert request.mixture is not None
    return msgspec.structs.replace(request, mixture=replace(request.mixture, heads=True))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("vocab", "padding"), [(100, 0), (20_000, 8)])
def test_heads_are_those_of_the_references_rows(kind: str, vocab: int, padding: int) -> None:
    rng = np.random.default_rng(vocab)
    requests = [with_heads(random_request(rng, LOGITS[kind], vocab, padding=padding)) for _ in range(12)]
    heads = 0
    for request, found in zip(requests, DeviceSampler()(requests), strict=True):
        mixture = request.mixture
        assert mixture is not None
        branches = [[dist for part in parts for dist in part.dists()] for parts in request.branches]
        expected = sample_mixed_rows(branches, request.rows, mixture)
        extra = len(request.rows) - len(mixture.tokens)
        assert [row.token for row in found] == [row.token for row in expected]
        for row, one, other in list(zip(request.rows, found, expected, strict=True))[extra:]:
            head, truth = one.head, other.head
            assert one.dists is not None and other.dists is not None
            for ours, theirs in zip(one.dists(), other.dists(), strict=True):
                assert np.array_equal(ours.probs, theirs.probs)
            assert truth is not None
            if head is None:  # all allowed ids are very unlikely: float32 may see them as equals
                assert row.allowed is not None
                continue
            # What the two heads share is equal, and what one lacks is within its bounds.
            shared, at, there = np.intersect1d(head.dist.ids, truth.dist.ids, return_indices=True)
            assert len(shared) >= min(np.count_nonzero(truth.dist.probs), 100) - 20 or kind == "tied"
            np.testing.assert_allclose(head.dist.probs[at], truth.dist.probs[there], rtol=HEAD_ERROR, atol=1e-30)
            lacks = ~np.isin(truth.dist.ids, head.dist.ids)
            ids, probs = truth.dist.ids[lacks], truth.dist.probs[lacks]
            assert (probs <= head.max_prob * (1.0 + HEAD_ERROR) + 1e-30).all()
            noise = gumbel(row.params.seed, row.position, ids) if row.params.temperature else np.zeros(len(ids))
            with np.errstate(divide="ignore"):
                assert (np.log(probs) + noise <= head.max_score + HEAD_ERROR).all()
            assert head.dist.tail == pytest.approx(1.0 - float(head.dist.probs.sum()), abs=HEAD_ERROR)
            heads += 1
            for ours, theirs in zip(one.branch_heads, other.branch_heads, strict=True):
                assert ours.ids.tolist() == theirs.ids.tolist()
                np.testing.assert_allclose(ours.probs, theirs.probs, rtol=HEAD_ERROR)
    assert heads > 20


@pytest.mark.parametrize("kind", HOSTILE)
def test_every_row_that_no_model_should_make_has_the_token_and_a_head_of_the_reference(kind: str) -> None:
    rng = np.random.default_rng(2)
    for vocab in (5, 65, 257, 2048):
        requests = [with_heads(random_request(rng, HOSTILE[kind], vocab, options=EXTREME)) for _ in range(8)]
        for request, found in zip(requests, DeviceSampler()(requests), strict=True):
            for row, one, other in zip(request.rows, found, request.by_reference(), strict=True):
                assert one.token == other.token, (vocab, row)
                head, truth = one.head, other.head
                # In these kinds 0.01 % is less than float32 can tell.
                if head is None or truth is None or kind in ("huge", "far_apart"):
                    continue
                _, at, there = np.intersect1d(head.dist.ids, truth.dist.ids, return_indices=True)
                np.testing.assert_allclose(
                    head.dist.probs[at], truth.dist.probs[there], rtol=2 * HEAD_ERROR, atol=1e-12, err_msg=str(row)
                )


def test_a_branch_with_many_evident_ids_loses_none() -> None:
    """Two hundred equal probabilities: more than are read first."""
    logits = torch.full((1, 5000), -30.0)
    logits[0, 100:300] = 0.0
    ((head,),) = answers_of([evidence_heads(torch.softmax(logits, -1))])
    assert head.ids.tolist() == list(range(100, 300))
    assert head.tail == pytest.approx(0.0, abs=1e-5)
    assert evidence_head(head) is head
