"""Rows of logits by groups of ids: one sweep for the groups' maxima, then only the groups that matter.

Groups are those of the common noise (`core.sampling.noise.GROUP`). Equal values go to the lowest id everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.sampling.noise import GROUP
from paceline.engine.sampling.transfers import to_device

MAX_BY_GROUPS = 130  # a larger k sorts the row


def group_maxima(scores: Tensor) -> Tensor:
    """(rows, groups): the largest logit of each group of ids; the last group may be smaller."""
    vocab = scores.shape[1]
    whole = vocab - vocab % GROUP
    maxima = torch.unflatten(scores[:, :whole], 1, (whole // GROUP, GROUP)).amax(2) if whole else scores[:, :0]
    return maxima if whole == vocab else torch.cat((maxima, scores[:, whole:].amax(1, keepdim=True)), 1)


def largest(values: Tensor, maxima: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ids and values of the k largest of each row, falling, equals by rising id. Of equals at the edge any may be left
    out. maxima: (rows, groups) of the groups of ids. rows: (rows, 1) of `values`; None: all, in order."""
    if k <= MAX_BY_GROUPS and k < maxima.shape[1]:
        ids = ids_of(torch.topk(maxima, k).indices.sort(dim=1).values)
        candidates = gathered(values, ids, rows)
        best = torch.topk(candidates, k)
        found, at = best.values, ids.gather(1, best.indices)
    else:
        best = torch.topk(values if rows is None else values[rows[:, 0]], k)
        found, at = best.values, best.indices
    at, order = at.sort(dim=1)
    found, by_value = found.gather(1, order).sort(dim=1, descending=True, stable=True)
    return at.gather(1, by_value), found


def ids_of(groups: Tensor) -> Tensor:
    """(rows, n) groups → (rows, n * GROUP) ids; the last group's may be beyond the vocabulary."""
    return (groups[:, :, None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten(1)


def gathered(scores: Tensor, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """Logits of ids, -inf for those beyond the vocabulary. rows: as of `largest`."""
    vocab = scores.shape[1]
    within = ids.clamp(max=vocab - 1)
    found = scores.gather(1, within) if rows is None else scores[rows, within]
    return found if vocab % GROUP == 0 else found.masked_fill_(ids >= vocab, -torch.inf)


def some_rows(tensor: Tensor, which: Sequence[int]) -> Tensor:
    """Some rows, ascending; the tensor itself for all of them."""
    return tensor if len(which) == len(tensor) else tensor[to_device(which, tensor.device)]
