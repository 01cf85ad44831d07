"""Logits that stay on the model's device, and the answers to `Engine.sample` from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.engine.base import Logits, SampleRequest
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.sampling.mixture_sampler import MixedRows, MixtureSampler
from paceline.engine.sampling.transfers import to_device
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


class DeviceSampler:
    """`Engine.sample` for engines whose forwards return `DeviceLogits`."""

    def __init__(self) -> None:
        self._single = BatchSampler()
        self._mixed = MixtureSampler(self._single)

    def __call__(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        answers: list[list[SampledRow]] = [[] for _ in requests]
        alone: list[tuple[int, tuple[Tensor, int], RowSampling]] = []  # request, row of a tensor, what is wanted
        mixed: dict[int, list[tuple[int, MixedRows]]] = {}  # by the number of branches
        for number, request in enumerate(requests):
            branches = [_places(parts) for parts in request.branches]
            known = [branch for branch in branches if branch is not None]
            if len(known) < len(branches):
                answers[number] = list(request.by_reference())  # a wrapped engine has replaced the distributions
                continue
            mixture = request.mixture
            count = len(request.rows) if mixture is None else len(request.rows) - len(mixture.tokens)
            alone += [(number, place, row) for place, row in zip(known[-1][:count], request.rows, strict=False)]
            if mixture is not None:
                rows = [branch[len(branch) - len(mixture.tokens) :] for branch in known]
                mixed.setdefault(len(rows), []).append((number, MixedRows(request.rows[count:], mixture, rows)))
        for (number, _, _), row in zip(alone, self._sample_alone(alone), strict=True):
            answers[number].append(row)
        for group in mixed.values():
            for (number, _), found in zip(group, self._mixed.sample([rows for _, rows in group]), strict=True):
                answers[number] += found
        return [tuple(answer) for answer in answers]

    def _sample_alone(self, wanted: Sequence[tuple[int, tuple[Tensor, int], RowSampling]]) -> list[SampledRow]:
        """Rows of one tensor in one pass."""
        by_tensor: dict[int, list[int]] = {}
        for at, (_, (scores, _), _) in enumerate(wanted):
            by_tensor.setdefault(id(scores), []).append(at)
        found: dict[int, SampledRow] = {}
        for places in by_tensor.values():
            scores = wanted[places[0]][1][0]
            index = [wanted[at][1][1] for at in places]
            some = scores if index == list(range(len(scores))) else scores[to_device(index, scores.device)]
            found.update(zip(places, self._single.sample(some, [wanted[at][2] for at in places]), strict=True))
        return [found[at] for at in range(len(wanted))]


def _places(parts: Sequence[Logits]) -> list[tuple[Tensor, int]] | None:
    """The rows of a branch in tensors; None for logits that are not in one."""
    places: list[tuple[Tensor, int]] = []
    for part in parts:
        if not isinstance(part, DeviceLogits):
            return None
        places += [(part.scores, row) for row in range(part.first, part.stop)]
    return places
