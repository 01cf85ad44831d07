"""Rows without top-k on the CPU: `open_sampler` where a look at a number costs nothing.

Each row's groups of ids are bounded by their largest logit and their least noise, and only groups and ids that can
still win are read; so a row costs the sweep for its groups' maxima, a hash for each group, and little else. Top-p needs
the mass before the candidate: the groups that reach its logit are read, all others are bounded by their maxima, and the
whole row is summed only where these bounds do not decide. Rows are handled together, as lists of (row, group) pairs.

Logits and scores are relative to the row's largest logit: what competes is near it, so float32 suffices to discard.
"""

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
from paceline.engine.sampling.groups import GroupReader
from paceline.engine.sampling.margins import DISTINCT, MARGIN
from paceline.engine.sampling.workspace import Workspace

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Indices = NDArray[np.intp]

_CANDIDATES = 6  # best scores of a row that top-p and min-p may choose from
_FIRST_GROUPS = 8  # with the highest bounds, read in every row
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
    search = _Search(scores, maxima, inverse, keys, margin, workspace)
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
    search: _Search, which: Indices, logits: Singles, top_p: Floats, min_p: Floats
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


class _Search:
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
