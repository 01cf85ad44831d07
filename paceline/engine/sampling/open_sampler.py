"""Rows without top-k: the best scores are found by the noise's bounds, then top-p and min-p are checked for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling.noise import FIRST_GROUP, GAMMA, GROUP, mixed, row_keys, uniforms
from paceline.core.sampling.row import RowSampling
from paceline.engine.sampling.noise import DISTINCT, MARGIN, GroupNoise
from paceline.engine.sampling.workspace import (
    Array,
    GroupReader,
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
    """(rows,) sums of the values above each row's threshold, all others of which become 0. thresholds: (rows, 1)"""
    if probs.device.type == "cpu":  # twice as fast as a mask
        for row, threshold in zip(probs, thresholds.tolist(), strict=True):
            torch.threshold_(row, threshold[0], 0.0)
        return probs.sum(1)
    return torch.where(probs > thresholds, probs, 0.0).sum(1)


# Rows without top-k on the CPU: `open_sampler` where a look at a number costs nothing.
#
# Each row's groups of ids are bounded by their largest logit and their least noise, and only groups and ids that can
# still win are read; so a row costs the sweep for its groups' maxima, a hash for each group, and little else. Top-p
# needs the mass before the candidate: the groups that reach its logit are read, all others are bounded by their
# maxima, and the whole row is summed only where these bounds do not decide. Rows are handled together, as lists of
# (row, group) pairs.
#
# Logits and scores are relative to the row's largest logit: what competes is near it, so float32 suffices to discard.


Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Indices = NDArray[np.intp]

_SLACK = 1e-3  # nats: more than the rounding of a bound in float32
_PAIRS = 4096  # groups read at a time: a megabyte
_HASHED = 4  # rows hashed at a time: their arrays fit the cache
_MAX_GROUPS = 600  # that reach a candidate: of more the whole row is summed


def sample_open_rows(
    scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling], margin: Floats, workspace: Workspace
) -> list[int | None]:
    """The token of each row; None where it is not certain. scores: (rows, vocab). maxima: (rows, groups). margin:
    (rows,) as of `margins`."""
    options = np.array([(1.0 / row.params.temperature, row.params.top_p, row.params.min_p) for row in rows])
    inverse, top_p, min_p = options.T
    keys = row_keys([row.params.seed for row in rows], [row.position for row in rows])
    search = _HostSearch(scores, maxima, inverse, keys, margin, workspace)
    tokens: list[int | None] = [None] * len(rows)
    waiting = np.flatnonzero(np.isfinite(search.best))  # else the reference says what is wrong
    for place in range(_CANDIDATES):
        if not len(waiting):
            break
        ids, logits, certain = search.candidates(waiting, place)
        waiting = waiting[certain]
        kept, dropped = _filtered(search, waiting, logits, top_p[waiting], min_p[waiting])
        for row, token in zip(waiting[kept].tolist(), ids[kept].tolist(), strict=True):
            tokens[row] = token
        waiting = waiting[dropped]
    return tokens


def _filtered(
    search: _HostSearch, which: Indices, logits: Singles, top_p: Floats, min_p: Floats
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Candidates that min-p and top-p keep, and those that they drop; of the others it is not certain."""
    kept, dropped = np.ones(len(which), dtype=np.bool_), np.zeros(len(which), dtype=np.bool_)
    limited = np.flatnonzero((min_p > 0.0) | (top_p < 1.0))
    limited = limited[~search.are_alone(which[limited], logits[limited])]
    if not len(limited):
        return kept, dropped
    which, logits, top_p, min_p = which[limited], logits[limited], top_p[limited], min_p[limited]
    margin = search.margin[which]
    with np.errstate(divide="ignore"):
        distance = search.relative(which, logits) - np.log(min_p)
    inside, outside = distance >= margin, distance <= -margin
    summed = np.flatnonzero(inside & (top_p < 1.0))
    inside[summed], outside[summed] = search.are_within(which[summed], logits[summed], top_p[summed])
    kept[limited], dropped[limited] = inside, outside
    return kept, dropped


class _HostSearch:
    """The ids of each row with the best scores. Scores: (logit - the largest) / temperature + noise."""

    def __init__(
        self,
        scores: Tensor,
        maxima: Tensor,
        inverse: Floats,
        keys: NDArray[np.uint64],
        margin: Floats,
        workspace: Workspace,
    ) -> None:
        self._scores, self._reader, self._workspace = scores, GroupReader(scores), workspace
        self._maxima: Singles = maxima.numpy()
        self.best: Singles = self._maxima.max(1)  # (rows,)
        self.margin, self._keys = margin, keys
        self._inverse, self._singles = inverse, inverse.astype(np.float32)
        self._relative: Singles = workspace.buffer("relative maxima", maxima).numpy()
        self._bounds: Singles = workspace.buffer("bounds", maxima).numpy()  # of all scores in a group
        with np.errstate(invalid="ignore"):  # inf - inf, of rows that are left out
            np.subtract(self._maxima, self.best[:, None], out=self._relative)
            self._relative *= self._singles[:, None]
            _bound_scores(keys, self._relative, out=self._bounds)
            self._known = self._first_look()  # (rows, n) falling: scores that ids of the row are known to have

    def _first_look(self) -> Floats:
        """Scores of ids of the groups with the highest bounds, so that few other groups are left to be searched."""
        num_rows, num_groups = self._bounds.shape
        count = min(_FIRST_GROUPS, num_groups)
        groups = torch.topk(torch.from_numpy(self._bounds), count).indices.numpy()
        every = np.arange(num_rows)
        known = np.full((num_rows, _CANDIDATES + 1), -np.inf)
        found = self._reaching(every, groups[:, 0], np.full(num_rows, -np.inf))  # all ids of the first group
        scores = np.full((num_rows, GROUP), -np.inf)
        scores[found.rows, found.ids % GROUP] = found.scores
        known[:, 1:] = -np.sort(-scores, axis=1)[:, :_CANDIDATES]
        if count > 1:  # of the others only what is better than all of those
            found = self._reaching(np.repeat(every, count - 1), groups[:, 1:].ravel(), known[:, 1])
            np.maximum.at(known[:, 0], found.rows, found.scores)
        return -np.sort(-known, axis=1)[:, :_CANDIDATES]

    def relative(self, which: Indices, logits: Singles) -> Floats:
        """(n,) logits of these rows as scores without noise."""
        found: Floats = (logits.astype(np.float64) - self.best[which]) * self._inverse[which]
        return found

    def are_alone(self, which: Indices, logits: Singles) -> NDArray[np.bool_]:
        """True for the largest logits of their rows that no other is near."""
        alone: NDArray[np.bool_] = logits == self.best[which]
        at = np.flatnonzero(alone)
        floor = self.best[which[at]] - np.float32(MARGIN)
        near = self._maxima[which[at]] >= floor[:, None]
        single = near.sum(1) == 1
        alone[at[~single]] = False
        at, floor, groups = at[single], floor[single], near[single].argmax(1)
        alone[at] = (self._reader.read(which[at], groups) >= floor[:, None]).sum(1) == 1
        return alone

    # ---- best scores ------------------------------------------------------------------------------------------------
    def candidates(self, which: Indices, place: int) -> tuple[Indices, Singles, NDArray[np.bool_]]:
        """(n,) ids of these rows with the best score but for `place` better ones, their logits, and whether no other
        score is near."""
        floor = self._known[which, place] - 2 * self.margin[which]
        floors = np.full(len(self.best), np.inf)
        floors[which] = floor
        lowest = np.maximum(floor - _SLACK, np.finfo(np.float32).min).astype(np.float32)  # no id that cannot be drawn
        found = self._reaching(*_pairs(self._bounds[which] >= lowest[:, None], which), floors)
        order = np.lexsort((-found.scores, found.rows))
        rows, ids, scores, logits = found.rows[order], found.ids[order], found.scores[order], found.logits[order]
        begin, end = np.searchsorted(rows, which), np.searchsorted(rows, which, side="right")
        there = begin + place < end
        at = np.where(there, begin + place, 0)
        certain = there.copy()
        if len(rows):
            for column in range(self._known.shape[1]):  # what is found now is better than what was known
                better = np.where(begin + column < end, scores[np.minimum(begin + column, len(rows) - 1)], -np.inf)
                self._known[which, column] = np.maximum(self._known[which, column], better)
            following = np.minimum(at + 1, len(rows) - 1)
            others = np.where(at + 1 < end, scores[following], floor)
            certain &= scores[at] - others > self.margin[which]
        return ids[at[certain]], logits[at[certain]], certain

    def _reaching(self, rows: Indices, groups: Indices, floors: Floats) -> _Scored:
        """All ids of these groups whose scores reach their row's floor. floors: of all rows."""
        parts = [
            self._scored(rows[at : at + _PAIRS], groups[at : at + _PAIRS], floors)
            for at in range(0, max(1, len(rows)), _PAIRS)
        ]
        return parts[0] if len(parts) == 1 else _Scored(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _scored(self, rows: Indices, groups: Indices, floors: Floats) -> _Scored:
        hashes = mixed((groups.astype(np.uint64) + np.uint64(FIRST_GROUP)) * np.uint64(GAMMA) + self._keys[rows])
        least = -np.log(uniforms(hashes)) / GROUP
        logits = self._reader.read(rows, groups)
        # An id's noise is at most its group's: most ids are out before theirs is made.
        needed = (floors[rows] - _SLACK + np.log(least)) / self._inverse[rows] + self.best[rows]
        lowest = np.maximum(needed, np.finfo(np.float32).min).astype(np.float32)
        flat = np.flatnonzero(logits >= lowest[:, None])
        pair, place = flat // GROUP, flat % GROUP
        of, logit = rows[pair], logits.ravel()[flat]
        ids = groups[pair] * GROUP + place
        own = -np.log(uniforms(mixed(ids.astype(np.uint64) * np.uint64(GAMMA) + self._keys[of])))
        own[(hashes[pair] & np.uint64(GROUP - 1)) == place.astype(np.uint64)] = 0.0
        scores = self.relative(of, logit) - np.log(least[pair] + own)
        reached = scores >= floors[of]
        return _Scored(of[reached], ids[reached], scores[reached], logit[reached])

    # ---- top-p ------------------------------------------------------------------------------------------------------
    def are_within(self, which: Indices, logits: Singles, top_p: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """True where the mass of the ids before these is certainly below top-p, and where certainly above."""
        least, most = self._bounded_masses(which, logits)
        low, high = top_p - self.margin[which], top_p + self.margin[which]
        for at in np.flatnonzero((most >= low) & (least <= high)):
            least[at], most[at] = self._mass(int(which[at]), float(logits[at]), float(low[at]))
        return most < low, least > high

    def _bounded_masses(self, which: Indices, logits: Singles) -> tuple[Floats, Floats]:
        """Bounds of the mass of all ids before these logits, without and with those that are near: groups that reach
        these logits are read, all others bounded by their maxima."""
        own = np.exp(self.relative(which, logits))
        floor, ceiling = logits - np.float32(DISTINCT), logits + np.float32(DISTINCT)
        lowest = np.maximum(floor, np.finfo(np.float32).min)
        reached = self._maxima[which] >= lowest[:, None]
        count = reached.sum(1)
        reached[count > _MAX_GROUPS] = False
        rest = np.exp(np.where(reached, -np.inf, self._relative[which])).sum(1, dtype=np.float64)
        before, with_near = sums = np.zeros((2, len(which)))
        at, groups = _pairs(reached, np.arange(len(which)))
        for first in range(0, len(groups), _PAIRS):
            some = at[first : first + _PAIRS]
            values = self._reader.read(which[some], groups[first : first + _PAIRS])
            flat = np.flatnonzero(values >= lowest[some][:, None])
            of, value = some[flat // GROUP], values.ravel()[flat]
            weights = np.exp(self.relative(which[of], value))
            for total, part in zip(sums, (weights * (value > ceiling[of]), weights), strict=True):
                total += np.bincount(of, part, len(which))
        total = with_near + GROUP * (rest + count * own)  # at most
        most = np.where(count > _MAX_GROUPS, 1.0, (with_near - own) / (with_near + rest))
        return before / total, most

    def _mass(self, row: int, logit: float, limit: float) -> tuple[float, float]:
        """The same exactly, from the whole row. limit: below it only the upper bound matters."""
        vocab = self._scores.shape[1]
        values, probs, some = (
            self._workspace.rows(name, 1, vocab, self._scores.device)[0] for name in ("row", "probs", "some")
        )
        values.copy_(self._scores[row])
        torch.softmax(torch.mul(values, float(self._singles[row]), out=some), 0, out=probs)
        own = float(np.exp((logit - self.best[row]) * self._inverse[row])) * float(probs.amax())
        most = float(torch.mul(probs, values >= logit - DISTINCT, out=some).sum()) - own
        if most < limit:
            return 0.0, most
        return float(torch.mul(probs, values > logit + DISTINCT, out=some).sum()), most


class _Scored(NamedTuple):
    """Ids with their scores, one entry each."""

    rows: Indices
    ids: Indices
    scores: Floats
    logits: Singles


def _pairs(chosen: NDArray[np.bool_], rows: Indices) -> tuple[Indices, Indices]:
    """Rows and groups that are chosen, by row. chosen: (n, groups). rows: (n,)"""
    flat = np.flatnonzero(chosen)  # ten times as fast as in two dimensions
    at, groups = np.divmod(flat, chosen.shape[1])
    return rows[at], groups


def _bound_scores(keys: NDArray[np.uint64], relative: Singles, *, out: Singles) -> None:
    """Upper bounds of all scores in the groups, from their largest logits. relative, out: (rows, groups)

    The least x of a group is -log(u) / GROUP = -log(1 - w) / GROUP >= (w + w² / 2) / GROUP, with w of 24 bits, rounded
    down.
    """
    counters = _counters(relative.shape[1])
    with np.errstate(divide="ignore"):  # w may be 0: then nothing bounds the group
        for at in range(0, len(keys), _HASHED):
            some = slice(at, at + _HASHED)
            hashes = mixed(keys[some, None] + counters)
            np.invert(hashes, out=hashes)
            hashes >>= np.uint64(40)
            w = hashes.astype(np.int32).astype(np.float32)  # twice as fast as at once
            w *= np.float32(2.0**-24)
            w += w * w * np.float32(0.5)
            w *= np.float32(1.0 / GROUP)
            np.subtract(relative[some], np.log(w, out=w), out=out[some])


@lru_cache(maxsize=4)
def _counters(num_groups: int) -> NDArray[np.uint64]:
    return np.arange(FIRST_GROUP, FIRST_GROUP + num_groups, dtype=np.uint64) * np.uint64(GAMMA)
