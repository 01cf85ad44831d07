"""Logits that stay on the model's device, and the answers to `Engine.sample` from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import NOT_SAMPLED, RowSampling, RowTree, SampledRow
from paceline.engine.base import Logits, SampleRequest
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.sampling.mixture_sampler import MixedRows, MixtureSampler
from paceline.engine.sampling.workspace import is_remote
from paceline.engine.tensors import dists


class DeviceLogits(msgspec.Struct, frozen=True):
    """`Logits` as rows of a tensor on the model's device, which the segments of a batch share."""

    scores: Tensor  # (rows of the batch, vocab)
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def dists(self) -> tuple[Dist, ...]:
        return dists(self.scores[self.first : self.stop])


class _Wanted(NamedTuple):
    """A row that is sampled by itself."""

    request: int
    row: int  # of the request's
    scores: Tensor
    place: int  # of its row in `scores`
    sampling: RowSampling


class DeviceSampler:
    """`Engine.sample` for engines whose forwards return `DeviceLogits`.

    Of trees the roots are sampled first, then the rows to which their tokens lead, those of all requests together.
    Where every look at the device is a wait, all rows are sampled at once.
    """

    def __init__(self) -> None:
        self._single = BatchSampler()
        self._mixed = MixtureSampler(self._single)

    def __call__(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        answers: list[list[SampledRow]] = [[] for _ in requests]
        alone: list[_Wanted] = []
        trees: dict[int, tuple[RowTree, list[_Wanted]]] = {}  # of requests of whose rows only some are sampled
        mixed: dict[int, list[tuple[int, MixedRows]]] = {}  # by the number of branches
        for number, request in enumerate(requests):
            branches = [_places(parts) for parts in request.branches]
            known = [branch for branch in branches if branch is not None]
            if len(known) < len(branches):
                answers[number] = list(request.by_reference())  # a wrapped engine has replaced the distributions
                continue
            mixture = request.mixture
            count = len(request.rows) if mixture is None else len(request.rows) - len(mixture.tokens)
            rows = [
                _Wanted(number, row, *place, sampling)
                for row, (place, sampling) in enumerate(zip(known[-1][:count], request.rows, strict=False))
            ]
            answers[number] = [NOT_SAMPLED] * len(rows)
            if request.tree is None or is_remote(rows[0].scores.device):
                alone += rows
            else:
                trees[number] = request.tree, rows
                alone += [rows[row] for row in request.tree.roots]
            if mixture is not None:
                places = [branch[len(branch) - len(mixture.tokens) :] for branch in known]
                mixed.setdefault(len(places), []).append((number, MixedRows(request.rows[count:], mixture, places)))
        while alone:
            following: list[_Wanted] = []
            for each, sampled in zip(alone, self._sample_alone(alone), strict=True):
                answers[each.request][each.row] = sampled
                if each.request in trees:
                    tree, rows = trees[each.request]
                    child = tree.child(each.row, sampled.token)
                    following += [] if child is None else [rows[child]]
            alone = following
        for group in mixed.values():
            for (number, _), found in zip(group, self._mixed.sample([rows for _, rows in group]), strict=True):
                answers[number] += found
        return [tuple(answer) for answer in answers]

    def _sample_alone(self, wanted: Sequence[_Wanted]) -> list[SampledRow]:
        """Rows of one tensor in one pass."""
        by_tensor: dict[int, list[int]] = {}
        for at, each in enumerate(wanted):
            by_tensor.setdefault(id(each.scores), []).append(at)
        found: dict[int, SampledRow] = {}
        for which in by_tensor.values():
            rows = [wanted[at] for at in which]
            places, samplings = [each.place for each in rows], [each.sampling for each in rows]
            found.update(zip(which, self._single.sample(rows[0].scores, samplings, places), strict=True))
        return [found[at] for at in range(len(wanted))]


def _places(parts: Sequence[Logits]) -> list[tuple[Tensor, int]] | None:
    """The rows of a branch in tensors; None for logits that are not in one."""
    places: list[tuple[Tensor, int]] = []
    for part in parts:
        if not isinstance(part, DeviceLogits):
            return None
        places += [(part.scores, row) for row in range(part.first, part.stop)]
    return places
