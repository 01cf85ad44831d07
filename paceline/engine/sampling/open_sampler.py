"""Rows without top-k: the best scores are found by the noise's bounds, then top-p and min-p are checked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling.noise import GROUP, row_keys
from paceline.core.sampling.row import RowSampling
from paceline.engine.sampling.groups import gathered, ids_of, largest, some_rows
from paceline.engine.sampling.logits_processor import inverse_temperatures
from paceline.engine.sampling.margins import MARGIN, MASS_MARGIN
from paceline.engine.sampling.noise import GroupNoise
from paceline.engine.sampling.workspace import Workspace

_FIRST_GROUPS = 8  # with the highest bounds, searched in every row; then as many as its best score leaves open
_ALIKE = 8  # rows that are searched further together
_CANDIDATES = 6  # best scores of a row that top-p and min-p may choose from
_LEADERS = 32  # most probable ids whose masses are summed first, for top-p


class OpenSampler:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def sample(self, scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling]) -> list[int | None]:
        """The token of each row; None where it is not certain. maxima: of the groups of `scores`."""
        search = _Search(scores, maxima, rows)
        tokens: list[int | None] = [None] * len(rows)
        waiting = list(range(len(rows)))
        for place in range(_CANDIDATES - 1):
            search.settle(waiting, place)
            certain = [row for row in waiting if search.is_certain(row, place)]
            passed = self._passes(scores, maxima, search, rows, certain, place)
            for row in certain:
                if passed[row]:
                    tokens[row] = int(search.ids[row, place])
            waiting = [row for row in certain if passed[row] is False]
            if not waiting:
                break
        return tokens

    def _passes(
        self,
        scores: Tensor,
        maxima: Tensor,
        seen: _Search,
        rows: Sequence[RowSampling],
        which: Sequence[int],
        place: int,
    ) -> dict[int, bool | None]:
        """Whether min-p and top-p keep each row's candidate; None where that is not certain."""
        passed: dict[int, bool | None] = {}
        summed: list[int] = []
        for row in which:
            params = rows[row].params
            below = (float(seen.logits[row, place]) - float(seen.maximum[row])) / params.temperature
            passed[row] = True
            if params.min_p > 0.0 and below < 0.0:
                distance = below - float(np.log(params.min_p))
                passed[row] = None if abs(distance) < MARGIN else distance > 0.0
            if passed[row] and params.top_p < 1.0 and not (below == 0.0 and seen.has_one_maximum[row]):
                summed.append(row)
        for bounds in (_leading_mass, self._mass):  # most rows are settled by their most probable ids
            if summed:
                ids = torch.from_numpy(seen.ids[summed, place]).to(scores.device)[:, None]
                chosen = [rows[row] for row in summed]
                for row, low, high in zip(summed, *bounds(scores, maxima, summed, ids, chosen), strict=True):
                    limit = rows[row].params.top_p
                    outside, inside = low > limit + MASS_MARGIN, high < limit - MASS_MARGIN
                    passed[row] = inside if inside or outside else None
                summed = [row for row in summed if passed[row] is None]
        return passed

    def _mass(
        self, scores: Tensor, _: Tensor, which: Sequence[int], ids: Tensor, rows: Sequence[RowSampling]
    ) -> tuple[list[float], list[float]]:
        """Bounds of the mass that comes before ids, one a row: without and with those of an equal logit."""
        probs = self._workspace.softmax(self._workspace.picked(scores, which), rows)
        own = probs.gather(1, ids)
        most = _sums_above(probs, own * (1.0 - 2.0**-20)) - own[:, 0]
        close = any(mass >= row.params.top_p - MASS_MARGIN for mass, row in zip(most.tolist(), rows, strict=True))
        least = _sums_above(probs, own) if close else torch.zeros_like(most)
        return least.tolist(), most.tolist()


class _Search:
    """Ids of each row with the best scores, on the host. Scores: logit / temperature + noise."""

    def __init__(self, scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling]) -> None:
        device = scores.device
        self._scores = scores
        self._inverse = inverse_temperatures(rows, device)
        keys = row_keys([row.params.seed for row in rows], [row.position for row in rows])
        self._noise = GroupNoise(torch.from_numpy(keys.view(np.int64)).to(device), maxima.shape[1])
        self._bounds = maxima.double() * self._inverse - torch.log(self._noise.least)  # (rows, groups)
        maximum = maxima.amax(1, keepdim=True)
        self.maximum: NDArray[np.float32] = maximum[:, 0].cpu().numpy()  # (rows,)
        alone = (maxima == maximum).sum(1) == 1
        first = gathered(scores, ids_of(maxima.argmax(1, keepdim=True)))
        self.has_one_maximum: NDArray[np.bool_] = (alone & ((first == maximum).sum(1) == 1)).cpu().numpy()  # (rows,)
        shape = len(rows), min(_CANDIDATES, GROUP)
        self.ids: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.scores: NDArray[np.float64] = np.zeros(shape)  # falling
        self.logits: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)
        self._rest: NDArray[np.float64] = np.zeros(len(rows))  # no other id has a better score
        self._look(list(range(len(rows))), _FIRST_GROUPS)

    def is_certain(self, row: int, place: int) -> bool:
        """The candidate has the next best score of the row, and no other is near."""
        score = self.scores[row, place]
        return bool(score > self._rest[row] + MARGIN and score - self.scores[row, place + 1] > MARGIN)

    def settle(self, which: Sequence[int], place: int) -> None:
        """Search the groups that may hold better ids than the rows' candidates at this place."""
        scores = self.scores[which, place]
        low = np.isfinite(scores) & ~(scores > self._rest[which] + MARGIN)
        open_rows = [row for row, is_low in zip(which, low, strict=True) if is_low]
        if not open_rows:
            return
        reached = torch.from_numpy(self.scores[open_rows, place]).to(self._bounds.device)[:, None]
        needed = (self._bounds[open_rows] >= reached - 2 * MARGIN).sum(1).cpu().numpy()
        order = np.argsort(needed)
        for part in np.array_split(order, -(-len(order) // _ALIKE)):  # rows that need about as many groups
            self._look([open_rows[at] for at in part], int(needed[part[-1]]))

    def _look(self, which: Sequence[int], num_groups: int) -> None:
        """Score all ids of the groups with the highest bounds, and keep the best."""
        rows = torch.tensor(which, device=self._bounds.device)
        bounds = some_rows(self._bounds, which)
        highest = torch.topk(bounds, min(num_groups + 1, bounds.shape[1]))
        everything = highest.values.shape[1] <= num_groups
        groups = highest.indices[:, :num_groups]
        ids = ids_of(groups)
        logits = gathered(self._scores, ids, rows[:, None])
        scored = logits.double() * some_rows(self._inverse, which) + self._noise.gumbel(groups, rows)
        best = torch.topk(scored, self.ids.shape[1])
        self.ids[which] = ids.gather(1, best.indices).cpu().numpy()
        self.scores[which] = best.values.cpu().numpy()
        self.logits[which] = logits.gather(1, best.indices).cpu().numpy()
        self._rest[which] = -np.inf if everything else highest.values[:, num_groups].cpu().numpy()


def _leading_mass(
    scores: Tensor, maxima: Tensor, which: Sequence[int], ids: Tensor, rows: Sequence[RowSampling]
) -> tuple[list[float], list[float]]:
    """Bounds as of `_mass`, from the most probable ids alone; all others are bounded by their groups' maxima."""
    inverse = inverse_temperatures(rows, scores.device)
    index = torch.tensor(which, device=scores.device)[:, None]
    maxima = some_rows(maxima, which)
    _, leading = largest(scores, maxima, min(_LEADERS, scores.shape[1]), index)
    best, last, own = leading[:, :1], leading[:, -1:], scores[index, ids]
    weights = torch.exp((leading - best).double() * inverse)
    others = torch.exp((torch.minimum(maxima, last) - best).double() * inverse).sum(1) * GROUP
    known = weights.sum(1)
    better = torch.where(leading > own, weights, 0.0).sum(1)
    its_weight = torch.exp((own - best).double() * inverse)[:, 0]
    with_equals = torch.where(leading >= own, weights, 0.0).sum(1) - its_weight
    most = torch.where(own[:, 0] > last[:, 0], with_equals / known, 1.0)
    return (better / (known + others)).tolist(), most.tolist()


def _sums_above(probs: Tensor, thresholds: Tensor) -> Tensor:
    """(rows,) sums of the values above each row's threshold, all others of which become 0. thresholds: (rows, 1)"""
    if probs.device.type == "cpu":  # twice as fast as a mask
        for row, threshold in zip(probs, thresholds.tolist(), strict=True):
            torch.threshold_(row, threshold[0], 0.0)
        return probs.sum(1)
    return torch.where(probs > thresholds, probs, 0.0).sum(1)
