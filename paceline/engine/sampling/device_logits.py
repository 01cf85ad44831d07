"""Logits that stay on the model's device, and the answers to `Engine.sample` from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import SampledRow
from paceline.engine.base import SampleRequest
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.tensors import dists


@dataclass(frozen=True, slots=True)
class DeviceLogits:
    """`Logits` as rows of a tensor on the model's device, which the segments of a batch share."""

    scores: Tensor  # (rows of the batch, vocab)
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def dists(self) -> tuple[Dist, ...]:
        return dists(self.scores[self.first : self.stop])


def sample_requests(sampler: BatchSampler, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
    """`Engine.sample`: rows of one tensor in one pass."""
    tensors: dict[int, Tensor] = {}
    places: dict[int, list[tuple[int, int, int]]] = {}  # by tensor: row of it, request, row of the request
    answers: list[tuple[SampledRow, ...] | list[SampledRow | None]] = []
    for number, request in enumerate(requests):
        parts = [part for part in request.logits if isinstance(part, DeviceLogits)]
        if len(parts) < len(request.logits):
            answers.append(request.by_reference())  # a wrapped engine has replaced the distributions
            continue
        answers.append([None] * len(request.rows))
        at = 0
        for part in parts:
            tensors[id(part.scores)] = part.scores
            rows = range(part.first, part.stop)
            places.setdefault(id(part.scores), []).extend((row, number, at + i) for i, row in enumerate(rows))
            at += len(part)
    for key, wanted in places.items():
        scores = tensors[key]
        index = [row for row, _, _ in wanted]
        scores = scores if index == list(range(len(scores))) else scores[index]
        sampled = sampler.sample(scores, [requests[number].rows[row] for _, number, row in wanted])
        for (_, number, row), found in zip(wanted, sampled, strict=True):
            answer = answers[number]
            assert isinstance(answer, list)
            answer[row] = found
    return [tuple(row for row in answer if row is not None) for answer in answers]
