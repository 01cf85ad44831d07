"""Rows of logits by groups of ids: one sweep for the groups' maxima, then only the groups that matter.

Groups are those of the common noise (`core.sampling.noise.GROUP`). Equal values go to the lowest id everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling.noise import GROUP
from paceline.engine.sampling.transfers import to_device

_LEAST_BITS = 0xFF80  # of minus infinity in bfloat16
MAX_BY_GROUPS = 130  # a larger k sorts the row


def group_maxima(scores: Tensor) -> Tensor:
    """(rows, groups) float32: the largest logit of each group of ids; the last group may be smaller."""
    if scores.dtype == torch.bfloat16 and scores.device.type == "cpu":
        return _half_maxima(scores)
    return _by_group(scores.float(), torch.amax)


def _by_group(scores: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    vocab = scores.shape[1]
    whole = vocab - vocab % GROUP
    found = reduce(torch.unflatten(scores[:, :whole], 1, (whole // GROUP, GROUP)), dim=2) if whole else scores[:, :0]
    return found if whole == vocab else torch.cat((found, reduce(scores[:, whole:], dim=1, keepdim=True)), 1)


def _half_maxima(scores: Tensor) -> Tensor:
    """Maxima of bfloat16 as of integers with the same bits, in an eighth of the time: those at least 0 have the order
    of their bits, those below the reverse. A row in which a number is not one has no other maxima."""
    bits = scores.view(torch.int16)
    best = _by_group(bits, torch.amax)
    if bool((best < 0).any()):
        best = torch.where(best < 0, _by_group(bits, torch.amin), best)
    found = best.view(torch.bfloat16).float()
    highest = scores.view(torch.int16).numpy().view(np.uint16).max(1)  # of all below 0, those that are no number
    found[torch.from_numpy(highest > _LEAST_BITS)] = torch.nan
    return found


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


class GroupReader:
    """Groups of ids of a CPU tensor, each read as one block of memory."""

    def __init__(self, scores: Tensor) -> None:
        """scores: (rows, vocab) float32 or bfloat16, the ids of a row adjacent."""
        self._is_half = scores.dtype == torch.bfloat16
        self._vocab = scores.shape[1]
        count, stride = len(scores), scores.stride(0)
        end = scores.storage_offset() + count * stride
        self._stride = 0  # groups from one row to the next; 0: rows are not made of whole groups
        values = scores.view(torch.int16) if self._is_half else scores
        if stride % GROUP == 0 and end * scores.element_size() <= scores.untyped_storage().nbytes():
            self._stride = stride // GROUP
            values = values.as_strided((count * self._stride, GROUP), (GROUP, 1))
        self._values: NDArray[Any] = values.numpy()

    def read(self, rows: NDArray[np.intp], groups: NDArray[np.intp]) -> NDArray[np.float32]:
        """(n,) rows and groups → (n, GROUP) logits, -inf for ids beyond the vocabulary."""
        if self._stride:
            found = self._values.take(rows * self._stride + groups, axis=0)
        else:
            ids = groups[:, None] * GROUP + np.arange(GROUP)
            found = self._values[rows[:, None], np.minimum(ids, self._vocab - 1)]
        if self._is_half:
            found = (found.astype(np.int32) << 16).view(np.float32)
        if self._vocab % GROUP:
            last = np.flatnonzero(groups == self._vocab // GROUP)
            found[last, self._vocab % GROUP :] = -np.inf
        return found
