"""Rows without top-k: the best scores are found by the noise's bounds, then top-p and min-p are checked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling.dist import GROUP, row_keys
from paceline.core.sampling.sampler import RowSampling
from paceline.engine.sampling.noise import DISTINCT, GroupNoise
from paceline.engine.sampling.row_kernel import MARGIN
from paceline.engine.sampling.workspace import (
    Array,
    Rounds,
    Workspace,
    gathered,
    ids_of,
    inverse_temperatures,
    is_remote,
    largest,
    some_rows,
    to_device,
    together,
)

_FIRST_GROUPS = 8  # with the highest bounds, searched in every row; then as many as its best score leaves open
_ALIKE = 8  # rows that are searched further together
_CANDIDATES = 6  # best scores of a row that top-p and min-p may choose from
_LEADERS = 32  # most probable ids whose masses are summed first, for top-p


class OpenSampler:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def sample(
        self, scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling], margin: NDArray[np.float64]
    ) -> Rounds[list[int | None]]:
        """The token of each row; None where it is not certain. maxima: of the groups of `scores`. margin: (rows,)"""
        search = _Search(scores, maxima, rows, margin)
        yield from search.begin()
        tokens: list[int | None] = [None] * len(rows)
        waiting = list(range(len(rows)))
        for place in range(_CANDIDATES - 1):
            yield from search.settle(waiting, place)
            certain = [row for row in waiting if search.is_certain(row, place)]
            passed = yield from self._passes(scores, maxima, search, rows, certain, place)
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
    ) -> Rounds[dict[int, bool | None]]:
        """True for each row whose candidate min-p and top-p keep; None where that is not certain."""
        passed: dict[int, bool | None] = {}
        summed: list[int] = []
        for row in which:
            params = rows[row].params
            below = (float(seen.logits[row, place]) - float(seen.maximum[row])) / params.temperature
            passed[row] = True
            is_first = below == 0.0 and seen.has_one_maximum[row]
            if params.min_p > 0.0 and not is_first:
                distance = below - float(np.log(params.min_p))
                passed[row] = None if abs(distance) < seen.margin[row] else distance > 0.0
            if passed[row] and params.top_p < 1.0 and not is_first:
                summed.append(row)
        for is_leading in (True, False):  # most rows are settled by their most probable ids
            if not summed:
                break
            ids = to_device(seen.ids[summed, place], scores.device)[:, None]
            chosen = [rows[row] for row in summed]
            if is_leading and seen.first_masses is not None and self._is_first(seen, summed, place):
                low, high = (mass[summed] for mass in seen.first_masses)
            elif is_leading:
                low, high = yield _leading_mass(scores, maxima, summed, ids, chosen)
            else:
                low, high = yield from self._mass(scores, summed, ids, chosen, seen.margin[summed])
            for row, least, most in zip(summed, low.tolist(), high.tolist(), strict=True):
                limit, margin = rows[row].params.top_p, float(seen.margin[row])
                outside, inside = least > limit + margin, most < limit - margin
                passed[row] = inside if inside or outside else None
            summed = [row for row in summed if passed[row] is None]
        return passed

    @staticmethod
    def _is_first(seen: _Search, which: Sequence[int], place: int) -> bool:
        """True if these candidates are those of the first look, whose masses are known."""
        return bool((seen.ids[which, place] == seen.first_ids[which]).all())

    def _mass(
        self, scores: Tensor, which: Sequence[int], ids: Tensor, rows: Sequence[RowSampling], margin: Array
    ) -> Rounds[tuple[Array, Array]]:
        """Bounds of the mass that comes before ids, one a row: without and with those of a logit that is near."""
        probs = self._workspace.softmax(self._workspace.picked(scores, which), rows)
        own = probs.gather(1, ids)
        temperatures = np.array([min(row.params.temperature, 1.0) for row in rows])
        near = torch.exp(to_device(DISTINCT / temperatures, probs.device))[:, None].float()
        (most,) = yield [_sums_above(probs, own / near) - own[:, 0]]
        limits = np.array([row.params.top_p for row in rows])
        if (most < limits - margin).all():
            return np.zeros_like(most), most
        (least,) = yield [_sums_above(probs, own * near)]
        return least, most


class _Search:
    """Ids of each row with the best scores, on the host. Scores: logit / temperature + noise."""

    def __init__(
        self, scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling], margin: NDArray[np.float64]
    ) -> None:
        device = scores.device
        self.margin = margin
        self._scores, self._maxima, self._rows = scores, maxima, rows
        self._inverse = inverse_temperatures(rows, device)
        keys = row_keys([row.params.seed for row in rows], [row.position for row in rows])
        self._noise = GroupNoise(to_device(keys.view(np.int64), device), maxima.shape[1])
        self._bounds = maxima.double() * self._inverse - torch.log(self._noise.least)  # (rows, groups)
        shape = len(rows), min(_CANDIDATES, GROUP)
        self.ids: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.scores: NDArray[np.float64] = np.zeros(shape)  # falling
        self.logits: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)
        self._rest: NDArray[np.float64] = np.zeros(len(rows))  # no other id has a better score
        self.first_ids: NDArray[np.int64] = self.ids[:, 0]  # (rows,) the best of the first look
        self.first_masses: tuple[Array, Array] | None = None  # (rows,) their bounds for top-p
        self.maximum: NDArray[np.float32]  # (rows,)
        self.has_one_maximum: NDArray[np.bool_]  # (rows,)

    def begin(self) -> Rounds[None]:
        """The first look, in one round; where a round is a wait, with all that most rows need."""
        maxima, every = self._maxima, list(range(len(self._rows)))
        maximum = maxima.amax(1, keepdim=True)
        alone = (maxima >= maximum - MARGIN).sum(1) == 1
        first = gathered(self._scores, ids_of(maxima.argmax(1, keepdim=True)))
        alone &= (first >= maximum - MARGIN).sum(1) == 1
        wanted = [maximum[:, 0], alone, *self._best(every, _FIRST_GROUPS)]
        ahead = is_remote(maxima.device) and any(row.params.top_p < 1.0 for row in self._rows)
        if ahead:
            wanted += _leading_mass(self._scores, maxima, every, wanted[2][:, :1], self._rows)
        found = yield wanted
        self.maximum, self.has_one_maximum = found[0], found[1]
        self._keep(every, _FIRST_GROUPS, found[2:6])
        self.first_ids = self.ids[:, 0].copy()
        if ahead:
            self.first_masses = found[6], found[7]

    def is_certain(self, row: int, place: int) -> bool:
        """The candidate has the next best score of the row, and no other is near."""
        score, margin = self.scores[row, place], self.margin[row]
        return bool(score > self._rest[row] + margin and score - self.scores[row, place + 1] > margin)

    def settle(self, which: Sequence[int], place: int) -> Rounds[None]:
        """Search the groups that may hold better ids than the rows' candidates at this place."""
        scores = self.scores[which, place]
        low = np.isfinite(scores) & ~(scores > self._rest[which] + self.margin[which])
        open_rows = [row for row, is_low in zip(which, low, strict=True) if is_low]
        if not open_rows:
            return
        needed_score = self.scores[open_rows, place] - 2 * self.margin[open_rows]
        reached = to_device(needed_score, self._bounds.device)[:, None]
        (needed,) = yield [(some_rows(self._bounds, open_rows) >= reached).sum(1)]
        order = np.argsort(needed)
        looks: list[Rounds[None]] = []
        for part in np.array_split(order, -(-len(order) // _ALIKE)):  # rows that need about as many groups
            looks.append(self._look(sorted(open_rows[at] for at in part), int(needed[part[-1]])))
        yield from together(looks)

    def _look(self, which: Sequence[int], num_groups: int) -> Rounds[None]:
        """Score all ids of the groups with the highest bounds, and keep the best."""
        found = yield self._best(which, num_groups)
        self._keep(which, num_groups, found)

    def _best(self, which: Sequence[int], num_groups: int) -> list[Tensor]:
        """Best ids of these groups, their scores and logits, and the highest bound of the other groups."""
        rows = to_device(which, self._bounds.device)
        bounds = some_rows(self._bounds, which)
        highest = torch.topk(bounds, min(num_groups + 1, bounds.shape[1]))
        groups = highest.indices[:, :num_groups]
        ids = ids_of(groups)
        logits = gathered(self._scores, ids, rows[:, None])
        scored = logits.double() * some_rows(self._inverse, which) + self._noise.gumbel(groups, rows)
        best = torch.topk(scored, self.ids.shape[1])
        return [ids.gather(1, best.indices), best.values, logits.gather(1, best.indices), highest.values[:, -1]]

    def _keep(self, which: Sequence[int], num_groups: int, found: Sequence[Array]) -> None:
        self.ids[which], self.scores[which], self.logits[which] = found[:3]
        self._rest[which] = -np.inf if num_groups >= self._bounds.shape[1] else found[3]


def _leading_mass(
    scores: Tensor, maxima: Tensor, which: Sequence[int], ids: Tensor, rows: Sequence[RowSampling]
) -> list[Tensor]:
    """Bounds as of `_mass`, from the most probable ids alone; all others are bounded by their groups' maxima."""
    inverse = inverse_temperatures(rows, scores.device)
    index = to_device(which, scores.device)[:, None]
    maxima = some_rows(maxima, which)
    ids = ids.clamp(max=scores.shape[1] - 1)  # a row without a candidate may name one beyond the vocabulary
    _, leading = largest(scores, maxima, min(_LEADERS, scores.shape[1]), index)
    best, last, own = leading[:, :1], leading[:, -1:], scores[index, ids]
    weights = torch.exp((leading - best).double() * inverse)
    others = torch.exp((torch.minimum(maxima, last) - best).double() * inverse).sum(1) * GROUP
    known = weights.sum(1)
    better = torch.where(leading > own + DISTINCT, weights, 0.0).sum(1)
    its_weight = torch.exp((own - best).double() * inverse)[:, 0]
    with_near = torch.where(leading >= own - DISTINCT, weights, 0.0).sum(1) - its_weight
    most = torch.where(own[:, 0] - DISTINCT > last[:, 0], with_near / known, 1.0)
    return [better / (known + others), most]


def _sums_above(probs: Tensor, thresholds: Tensor) -> Tensor:
    """(rows,) sums of the values above each row's threshold. thresholds: (rows, 1)"""
    return torch.where(probs > thresholds, probs, 0.0).sum(1)
