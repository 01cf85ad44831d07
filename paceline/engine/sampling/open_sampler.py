"""Rows without top-k: the best scores are found by the noise's bounds, then top-p and min-p are checked for them.

A score is logit / temperature + noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling import dist
from paceline.core.sampling.dist import GROUP, row_keys
from paceline.core.sampling.sampler import RowSampling
from paceline.engine.sampling.row_kernel import MARGIN
from paceline.engine.sampling.workspace import (
    DISTINCT,
    Array,
    Pending,
    Workspace,
    gathered,
    ids_of,
    inverse_temperatures,
    is_remote,
    largest,
    some_rows,
    to_device,
    to_host,
)

# Groups with the highest bounds, searched in every row; then as many as its best score leaves open. Where a second look
# is a wait, more at once.
_FIRST_GROUPS, _FIRST_GROUPS_OF_DEVICE = 8, 256
_CANDIDATES = 6  # best scores of a row that top-p and min-p may choose from


# The common noise of `core.sampling.dist` as tensors, on a model's device.
#
# On the CPU it is numpy's, which takes half of torch's time; elsewhere the same hash in torch's int64 arithmetic, equal
# bit for bit. Logarithms may differ from numpy's in their last bit, so who decides by this noise leaves a margin.


class GroupNoise:
    """The noise of some positions, by groups of ids."""

    def __init__(self, keys: Tensor, num_groups: int) -> None:
        """keys: (rows,) int64, `dist.row_keys`."""
        self._keys = keys
        counters = torch.arange(num_groups, device=keys.device) + dist.FIRST_GROUP
        self._hashes = _mixed(counters * _signed(dist.GAMMA) + keys[:, None])  # (rows, groups)
        self.least = _exponentials(self._hashes) / GROUP  # (rows, groups) the least exp(-G) of each

    def gumbel(self, groups: Tensor, rows: Tensor) -> Tensor:
        """(some, n) groups of these rows → (some, n * GROUP) Gumbel noise of their ids, float64."""
        place = torch.arange(GROUP, device=groups.device)
        ids = groups[:, :, None] * GROUP + place
        own = _exponentials(_mixed(ids * _signed(dist.GAMMA) + self._keys[rows][:, None, None]))
        hashes, least = (each[rows[:, None], groups][:, :, None] for each in (self._hashes, self.least))
        x = torch.where(hashes & (GROUP - 1) == place, least, least + own)
        return -torch.log(x).flatten(1)


def _mixed(counters: Tensor) -> Tensor:
    """The hash of counters, both int64 in place of uint64."""
    if counters.device.type == "cpu":
        return torch.from_numpy(dist.mixed(counters.numpy().view(np.uint64)).view(np.int64))
    return mixed_by_torch(counters)


def _exponentials(hashes: Tensor) -> Tensor:
    if hashes.device.type == "cpu":
        return torch.from_numpy(-np.log(dist.uniforms(hashes.numpy().view(np.uint64))))
    return exponentials_by_torch(hashes)


def mixed_by_torch(z: Tensor) -> Tensor:
    """SplitMix64's finaliser. int64 multiplication wraps around as that of uint64 does."""
    z = (z ^ _shifted(z, 30)) * _signed(dist.FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(dist.SECOND)
    return z ^ _shifted(z, 31)


def exponentials_by_torch(hashes: Tensor) -> Tensor:
    return -torch.log((_shifted(hashes, 12).double() + 0.5) * dist.STEP)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right as an unsigned number: torch repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


class GroupScores:
    """Scores of rows, each group of ids with a bound."""

    def __init__(self, logits: Tensor, maxima: Tensor, rows: Sequence[RowSampling], inverse: Tensor) -> None:
        """maxima: of the groups of `logits`. inverse: (rows, 1) of the temperatures."""
        keys = row_keys([row.params.seed for row in rows], [row.position for row in rows])
        self._noise = GroupNoise(to_device(keys.view(np.int64), logits.device), maxima.shape[1])
        self._logits, self._inverse = logits, inverse
        self.bounds = maxima.double() * inverse - torch.log(self._noise.least)  # (rows, groups)

    def best(self, which: Sequence[int], num_groups: int, count: int) -> list[Tensor]:
        """(rows, count) ids with the best scores in the groups with the highest bounds, falling, their scores and
        logits, and (rows,) a bound for the ids of all other groups."""
        rows = to_device(which, self.bounds.device)
        bounds = some_rows(self.bounds, which)
        highest = torch.topk(bounds, min(num_groups + 1, bounds.shape[1]))
        groups = highest.indices[:, :num_groups]
        ids = ids_of(groups)
        logits = gathered(self._logits, ids, rows[:, None])
        best = torch.topk(
            logits.double() * some_rows(self._inverse, which) + self._noise.gumbel(groups, rows),
            min(count, ids.shape[1]),
        )
        others = highest.values[:, -1]
        if num_groups >= bounds.shape[1]:
            others = torch.full_like(others, -torch.inf)
        return [ids.gather(1, best.indices), best.values, logits.gather(1, best.indices), others]


def open_tokens(
    workspace: Workspace, scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling], margin: NDArray[np.float64]
) -> Pending[list[int | None]]:
    """The token of each row; None where it is not certain. scores: logits. maxima: of the groups of `scores`. margin:
    (rows,)"""
    every, device = list(range(len(rows))), scores.device
    found = GroupScores(scores, maxima, rows, inverse_temperatures(rows, device))
    first = found.best(every, _FIRST_GROUPS_OF_DEVICE if is_remote(device) else _FIRST_GROUPS, _CANDIDATES)
    _, leading = largest(scores, maxima, min(2, scores.shape[1]))
    ahead = []
    if is_remote(device) and any(row.params.top_p < 1.0 for row in rows):
        ahead = _mass_before(workspace, scores, every, first[0][:, :1], rows)

    def finish(seen: Sequence[Array]) -> list[int | None]:
        ids, best, logits, rest, most, *masses = seen
        begun = ids[:, 0].copy()

        def keeps(which: Sequence[int], place: int) -> dict[int, bool | None]:
            """True for each row whose candidate min-p and top-p keep; None where that is not certain."""
            passed: dict[int, bool | None] = {}
            summed: list[int] = []
            for row in which:
                params = rows[row].params
                below = (float(logits[row, place]) - float(most[row, 0])) / params.temperature
                passed[row] = True
                if below == 0.0 and most[row, 0] - most[row, -1] > MARGIN:
                    continue  # the one most probable id
                if params.min_p > 0.0:
                    distance = below - float(np.log(params.min_p))
                    passed[row] = None if abs(distance) < margin[row] else distance > 0.0
                if passed[row] and params.top_p < 1.0:
                    summed.append(row)
            if not summed:
                return passed
            if masses and bool((ids[summed, place] == begun[summed]).all()):
                low, high = (mass[summed] for mass in masses)
            else:
                wanted, chosen = to_device(ids[summed, place], device)[:, None], [rows[row] for row in summed]
                low, high = to_host(_mass_before(workspace, scores, summed, wanted, chosen))
            for row, least, greatest in zip(summed, low.tolist(), high.tolist(), strict=True):
                outside = least > rows[row].params.top_p + margin[row]
                inside = greatest < rows[row].params.top_p - margin[row]
                passed[row] = bool(inside) if inside or outside else None
            return passed

        tokens: list[int | None] = [None] * len(rows)
        waiting = every
        for place in range(_CANDIDATES - 1):
            in_doubt = np.isfinite(best[:, place]) & ~(best[:, place] > rest + margin)
            if looked := [row for row in waiting if in_doubt[row]]:  # other groups may hold better ids
                reached = to_device(best[looked, place] - 2 * margin[looked], device)[:, None]
                (needed,) = to_host([(some_rows(found.bounds, looked) >= reached).sum(1)])
                again = to_host(found.best(looked, int(needed.max()), _CANDIDATES))
                ids[looked], best[looked], logits[looked], rest[looked] = again
            certain = (best[:, place] > rest + margin) & (best[:, place] > best[:, place + 1] + margin)
            passed = keeps([row for row in waiting if certain[row]], place)
            for row, is_kept in passed.items():
                tokens[row] = int(ids[row, place]) if is_kept else None
            waiting = [row for row, is_kept in passed.items() if is_kept is False]
            if not waiting:
                break
        return tokens

    return Pending([*first, leading, *ahead], finish)


def _mass_before(
    workspace: Workspace, scores: Tensor, which: Sequence[int], ids: Tensor, rows: Sequence[RowSampling]
) -> list[Tensor]:
    """Bounds of the mass that comes before ids, one a row: without and with those of a logit that is near."""
    probs = workspace.softmax(workspace.picked(scores, which), rows)
    own = probs.gather(1, ids.clamp(max=scores.shape[1] - 1))  # a row without a candidate may name an id beyond
    temperatures = np.array([min(row.params.temperature, 1.0) for row in rows])
    near = torch.exp(to_device(DISTINCT / temperatures, probs.device))[:, None].float()
    return [_sums_above(probs, own * near), _sums_above(probs, own / near) - own[:, 0]]


def _sums_above(probs: Tensor, thresholds: Tensor) -> Tensor:
    """(rows,) sums of the values above each row's threshold. thresholds: (rows, 1)"""
    return torch.where(probs > thresholds, probs, 0.0).sum(1)
