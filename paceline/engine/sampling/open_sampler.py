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

_GROUPS = 16, 256  # groups with the highest bounds that are searched; more for rows that fewer do not settle
_CANDIDATES = 6  # best scores of a row that top-p and min-p may choose from
_LEADERS = 32  # most probable ids whose masses are summed first, for top-p


class OpenSampler:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def sample(self, scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling], stage: int = 0) -> list[int | None]:
        """The token of each row; None where it is not certain. maxima: of the groups of `scores`."""
        seen = _Candidates.best(scores, maxima, rows, _GROUPS[stage])
        tokens: list[int | None] = [None] * len(rows)
        unsettled: list[int] = []  # more groups may hold better ids
        waiting = list(range(len(rows)))
        for place in range(_CANDIDATES - 1):
            certain: list[int] = []
            for row in waiting:
                score = seen.scores[row, place]
                if not score > seen.rest[row] + MARGIN:
                    unsettled.append(row)
                elif score - seen.scores[row, place + 1] > MARGIN:
                    certain.append(row)
            passed = self._passes(scores, maxima, seen, rows, certain, place)
            waiting = []
            for row in certain:
                if passed[row] is None:
                    continue
                if passed[row]:
                    tokens[row] = int(seen.ids[row, place])
                else:
                    waiting.append(row)
            if not waiting:
                break
        if unsettled and stage + 1 < len(_GROUPS):
            again = self.sample(scores[unsettled], maxima[unsettled], [rows[row] for row in unsettled], stage + 1)
            for row, token in zip(unsettled, again, strict=True):
                tokens[row] = token
        return tokens

    def _passes(
        self,
        scores: Tensor,
        maxima: Tensor,
        seen: _Candidates,
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


class _Candidates:
    """Ids of each row with the best scores, on the host. Scores: logit / temperature + noise."""

    __slots__ = ("has_one_maximum", "ids", "logits", "maximum", "rest", "scores")

    def __init__(self, ids: Tensor, scores: Tensor, logits: Tensor, rest: Tensor, maximum: Tensor, one: Tensor) -> None:
        self.ids: NDArray[np.int64] = ids.cpu().numpy()  # (rows, candidates)
        self.scores: NDArray[np.float64] = scores.cpu().numpy()  # (rows, candidates), falling
        self.logits: NDArray[np.float32] = logits.cpu().numpy()  # (rows, candidates)
        self.rest: NDArray[np.float64] = rest.cpu().numpy()  # (rows,) no other id has a better score
        self.maximum: NDArray[np.float32] = maximum.cpu().numpy()  # (rows,)
        self.has_one_maximum: NDArray[np.bool_] = one.cpu().numpy()  # (rows,)

    @staticmethod
    def best(scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling], num_groups: int) -> _Candidates:
        device = scores.device
        keys_on_host = row_keys([row.params.seed for row in rows], [row.position for row in rows])
        keys = torch.from_numpy(keys_on_host.view(np.int64)).to(device)
        inverse = inverse_temperatures(rows, device)
        group_noise = GroupNoise(keys, maxima.shape[1])
        bounds = maxima.double() * inverse - torch.log(group_noise.least)
        count = min(num_groups, maxima.shape[1])
        highest = torch.topk(bounds, min(count + 1, maxima.shape[1]))
        everything = highest.values.shape[1] <= count
        rest = torch.full_like(bounds[:, 0], -torch.inf) if everything else highest.values[:, count]
        groups = highest.indices[:, :count]
        ids = ids_of(groups)
        logits = gathered(scores, ids)
        scored = logits.double() * inverse + group_noise.gumbel(groups)
        top = torch.topk(scored, min(_CANDIDATES, scored.shape[1]))
        maximum = maxima.amax(1)
        one = ((maxima == maximum[:, None]).sum(1) == 1) & ((logits == maximum[:, None]).sum(1) == 1)
        return _Candidates(ids.gather(1, top.indices), top.values, logits.gather(1, top.indices), rest, maximum, one)


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
