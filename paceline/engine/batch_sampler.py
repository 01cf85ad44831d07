"""Tokens of many rows in one pass, where the logits are: torch's twin of `core.sampling.row.sample_row`.

A pass narrows, and decides only what is certain. The maxima of groups of 64 ids are one sweep over a row; with the
noise's bound for each group (`core.sampling.noise`) they leave a few groups that can hold the token, so that neither
noise nor exponentials of a whole vocabulary are made. Only top-p needs a sum over the vocabulary, and only where the
best candidate is not the most probable id.

Two candidates nearer than `MARGIN`, ids at the edge of top-k, top-p or min-p, and everything else that rounding could
decide, are left to the reference on the host, which sees the row as `tensors.dists` gives it. So the token is the
reference's on every row and device; equal logits go to the lowest id everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling import noise as core_noise
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.noise import GROUP
from paceline.core.sampling.row import RowSampling, SampledRow, sample_row
from paceline.core.sampling.sampler import logit_shifts, repeated_ids
from paceline.engine import noise
from paceline.engine.tensors import dists

MARGIN = 1e-4  # nats between scores: far more than float32's rounding of logits, temperature and softmax
MASS_MARGIN = 1e-4  # of a row's probability, for sums over a vocabulary in float32
_CHUNK = 32  # rows at a time: bounds the workspace, 20 MB with 152,000 ids
_GROUPS = 16, 256  # groups with the highest bounds that are searched; more for rows that fewer do not settle
_CANDIDATES = 6  # best scores of a row that top-p and min-p may choose from
_MAX_TOP_K = 64  # a larger top-k sorts the row
_EDGE = 16  # ids beyond top-k that are read too, so that equal logits at its edge are all seen
_DISTINCT = 1e-5  # nats: logits that differ by more have different probabilities in float32
_LEADERS = 32  # most probable ids whose masses are summed first, for top-p
_UNDERFLOW = 80.0  # nats below the best: probabilities in float32 may be 0 there


class BatchSampler:
    """Keeps its workspace between calls. For one thread."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.referred = 0  # rows left to the reference

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[SampledRow]:
        """logits: (rows, vocab), of any float type, on any device. One `vocab_size` for all rows."""
        found: list[SampledRow] = []
        with torch.inference_mode():
            for first in range(0, len(rows), _CHUNK):
                found += self._chunk(logits[first : first + _CHUNK], rows[first : first + _CHUNK])
        return found

    def _chunk(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[SampledRow]:
        plain = logits[:, : rows[0].vocab_size]
        changed = any(row.changes_logits for row in rows)
        if plain.dtype != torch.float32:
            plain = self._buffer("plain", plain).copy_(plain)
        tops = self._tops(plain, rows) if any(row.num_top for row in rows) else [None] * len(rows)
        scores = plain
        if changed:
            scores = self._buffer("changed", plain).copy_(plain)
            for row, wanted in enumerate(rows):
                if wanted.changes_logits:
                    _change(scores[row], wanted)
        tokens = self._tokens(scores, plain, rows)
        return [
            self._referred(logits[row], rows[row], top) if token is None else SampledRow(token, top)
            for row, (token, top) in enumerate(zip(tokens, tops, strict=True))
        ]

    def _referred(self, logits: Tensor, row: RowSampling, top: Dist | None) -> SampledRow:
        self.referred += 1
        (dist,) = dists(logits[None])
        return SampledRow(sample_row(dist, row).token, top)

    def _tokens(self, scores: Tensor, plain: Tensor, rows: Sequence[RowSampling]) -> list[int | None]:
        """The token of each row; None where it is not certain."""
        maxima = _group_maxima(scores)
        tokens: list[int | None] = [None] * len(rows)
        kinds: dict[str, list[int]] = {}
        for row, wanted in enumerate(rows):
            params = wanted.params
            cut = 0 < params.top_k < wanted.vocab_size
            kind = "greedy" if params.temperature == 0.0 else "top_k" if cut else "open"
            kinds.setdefault(kind, []).append(row)
        for kind, which in kinds.items():
            some, their_maxima, chosen = _rows(scores, which), _rows(maxima, which), [rows[row] for row in which]
            if kind == "greedy":
                found = _greedy(some, their_maxima, chosen)
            elif kind == "top_k":
                found = _top_k(some, their_maxima, chosen)
            else:
                found = self._open(some, their_maxima, chosen)
            for row, token in zip(which, found, strict=True):
                tokens[row] = token
        if any(row.allowed is not None for row in rows):
            # Where all allowed ids are very unlikely, the reference may see them as equals.
            low = (maxima.amax(1) < plain.amax(1) - _UNDERFLOW).tolist()
            tokens = [None if under else token for token, under in zip(tokens, low, strict=True)]
        return tokens

    # ---- without top-k ----------------------------------------------------------------------------------------------
    def _open(self, scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling], stage: int = 0) -> list[int | None]:
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
            again = self._open(scores[unsettled], maxima[unsettled], [rows[row] for row in unsettled], stage + 1)
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
        probs = self._softmax(self._picked(scores, which), rows)
        own = probs.gather(1, ids)
        most = _sums_above(probs, own * (1.0 - 2.0**-20)) - own[:, 0]
        close = any(mass >= row.params.top_p - MASS_MARGIN for mass, row in zip(most.tolist(), rows, strict=True))
        least = _sums_above(probs, own) if close else torch.zeros_like(most)
        return least.tolist(), most.tolist()

    def _picked(self, scores: Tensor, which: Sequence[int]) -> Tensor:
        """Copies of some rows, valid until the next call; the tensor itself for all of them."""
        if len(which) == len(scores):
            return scores
        index = torch.tensor(which, device=scores.device)
        return torch.index_select(scores, 0, index, out=self._buffer("picked", scores[: len(which)]))

    def _softmax(self, scores: Tensor, rows: Sequence[RowSampling]) -> Tensor:
        """(rows, vocab), at the rows' temperatures; valid until the next call."""
        probs = self._buffer("probs", scores)
        if any(row.params.temperature != 1.0 for row in rows):
            torch.mul(scores, _inverse_temperatures(rows, scores.device).float(), out=probs)
            scores = probs
        return torch.softmax(scores, -1, out=probs)

    def _tops(self, plain: Tensor, rows: Sequence[RowSampling]) -> list[Dist | None]:
        """Heads of the rows that want one."""
        k = max(row.num_top for row in rows)
        probs = torch.softmax(plain, -1, out=self._buffer("probs", plain))
        ids, values = _largest(probs, _group_maxima(probs), min(k, probs.shape[1]))
        all_ids, all_probs = ids.cpu().numpy().astype(np.int32), values.double().cpu().numpy()
        tops: list[Dist | None] = []
        for row, wanted in enumerate(rows):
            count = min(wanted.num_top, int(np.count_nonzero(all_probs[row])))
            order = np.argsort(all_ids[row, :count])
            kept = all_probs[row, :count][order]
            head = Dist(all_ids[row, :count][order], kept, max(1.0 - float(kept.sum()), 0.0))
            tops.append(head if wanted.num_top else None)
        return tops

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Workspace in float32 of this shape. Kept: a fresh one costs more in page faults than what fills it."""
        size = like.shape[0] * like.shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size or buffer.device != like.device:
            self._buffers[name] = buffer = torch.empty(size, device=like.device)
        return buffer[:size].view(like.shape)


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
        keys_on_host = core_noise.row_keys([row.params.seed for row in rows], [row.position for row in rows])
        keys = torch.from_numpy(keys_on_host.view(np.int64)).to(device)
        inverse = _inverse_temperatures(rows, device)
        group_noise = noise.GroupNoise(keys, maxima.shape[1])
        bounds = maxima.double() * inverse - torch.log(group_noise.least)
        count = min(num_groups, maxima.shape[1])
        highest = torch.topk(bounds, min(count + 1, maxima.shape[1]))
        everything = highest.values.shape[1] <= count
        rest = torch.full_like(bounds[:, 0], -torch.inf) if everything else highest.values[:, count]
        groups = highest.indices[:, :count]
        ids = _ids_of(groups)
        logits = _gathered(scores, ids)
        scored = logits.double() * inverse + group_noise.gumbel(groups)
        top = torch.topk(scored, min(_CANDIDATES, scored.shape[1]))
        maximum = maxima.amax(1)
        one = ((maxima == maximum[:, None]).sum(1) == 1) & ((logits == maximum[:, None]).sum(1) == 1)
        return _Candidates(ids.gather(1, top.indices), top.values, logits.gather(1, top.indices), rest, maximum, one)


def _sums_above(probs: Tensor, thresholds: Tensor) -> Tensor:
    """(rows,) sums of the values above each row's threshold, all others of which become 0. thresholds: (rows, 1)"""
    if probs.device.type == "cpu":  # twice as fast as a mask
        for row, threshold in zip(probs, thresholds.tolist(), strict=True):
            torch.threshold_(row, threshold[0], 0.0)
        return probs.sum(1)
    return torch.where(probs > thresholds, probs, 0.0).sum(1)


def _leading_mass(
    scores: Tensor, maxima: Tensor, which: Sequence[int], ids: Tensor, rows: Sequence[RowSampling]
) -> tuple[list[float], list[float]]:
    """Bounds as of `_mass`, from the most probable ids alone; all others are bounded by their groups' maxima."""
    inverse = _inverse_temperatures(rows, scores.device)
    index = torch.tensor(which, device=scores.device)[:, None]
    maxima = _rows(maxima, which)
    _, leading = _largest(scores, maxima, min(_LEADERS, scores.shape[1]), index)
    best, last, own = leading[:, :1], leading[:, -1:], scores[index, ids]
    weights = torch.exp((leading - best).double() * inverse)
    others = torch.exp((torch.minimum(maxima, last) - best).double() * inverse).sum(1) * GROUP
    known = weights.sum(1)
    better = torch.where(leading > own, weights, 0.0).sum(1)
    its_weight = torch.exp((own - best).double() * inverse)[:, 0]
    with_equals = torch.where(leading >= own, weights, 0.0).sum(1) - its_weight
    most = torch.where(own[:, 0] > last[:, 0], with_equals / known, 1.0)
    return (better / (known + others)).tolist(), most.tolist()


def _greedy(scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling]) -> list[int | None]:
    """The lowest id of the largest logit."""
    at, best = _largest(scores, maxima, min(2, scores.shape[1]))
    changed = torch.tensor([row.changes_logits for row in rows], device=scores.device)
    certain = ~_is_close(best[:, 0], best[:, -1], changed) if best.shape[1] > 1 else torch.ones_like(changed)
    first = maxima.argmax(1, keepdim=True)  # of equals the first
    ids = _ids_of(first)
    at = ids.gather(1, _gathered(scores, ids).argmax(1, keepdim=True))
    return [token if sure else None for token, sure in zip(at[:, 0].tolist(), certain.tolist(), strict=True)]


def _is_close(above: Tensor, below: Tensor, changed: Tensor) -> Tensor:
    """True where the reference may order two logits otherwise: it compares probabilities. Equal ones of the model's own
    are equal there too."""
    gap = above - below
    return torch.where(changed, gap <= MARGIN, (gap > 0.0) & (gap <= _DISTINCT))


def _top_k(scores: Tensor, maxima: Tensor, rows: Sequence[RowSampling]) -> list[int | None]:
    """Top-k on the device; top-p, min-p and noise among the few that remain on the host, in float64."""
    most = max(row.params.top_k for row in rows)
    at, values = _largest(scores, maxima, min(most + _EDGE, scores.shape[1]))
    ids, logits = at.cpu().numpy(), values.double().cpu().numpy()
    keys = core_noise.row_keys([row.params.seed for row in rows], [row.position for row in rows])
    temperatures = np.array([row.params.temperature for row in rows])[:, None]
    limits = np.array([row.params.top_k for row in rows])
    kept = np.arange(ids.shape[1]) < limits[:, None]
    kept &= logits > -np.inf
    every = np.arange(len(rows))
    edge, beyond = (logits[every, np.minimum(limits + more, ids.shape[1]) - 1] for more in (0, 1))
    changed = torch.tensor([row.changes_logits for row in rows])
    certain = ~_is_close(torch.from_numpy(edge), torch.from_numpy(beyond), changed).numpy()
    if ids.shape[1] < scores.shape[1]:
        certain &= (edge > logits[:, -1]) | (edge == -np.inf)  # else equals of the edge may be missing
    below = (logits - logits[:, :1]) / temperatures
    probs = np.where(kept, np.exp(below), 0.0)
    probs /= probs.sum(1, keepdims=True)
    before = np.cumsum(probs, axis=1) - probs
    top_p = np.array([row.params.top_p for row in rows])[:, None]
    min_p = np.array([row.params.min_p for row in rows])[:, None]
    cut = kept & (top_p < 1.0) & (before > 0.0)
    certain &= ~(cut & (np.abs(before - top_p) < MASS_MARGIN)).any(1)
    kept &= ~(cut & (before >= top_p))
    distance = below - np.log(np.maximum(min_p, np.finfo(np.float64).tiny))
    cut = kept & (min_p > 0.0) & (below < 0.0)
    certain &= ~(cut & (np.abs(distance) < MARGIN)).any(1)
    kept &= ~(cut & (distance < 0.0))
    drawn = np.where(kept, below + core_noise.gumbel_rows(keys, ids), -np.inf)
    best = drawn.argmax(1)
    score = drawn[every, best]
    drawn[every, best] = -np.inf
    certain &= (score - drawn.max(1) > MARGIN) & np.isfinite(score)
    return [int(ids[row, best[row]]) if certain[row] else None for row in range(len(rows))]


def _largest(values: Tensor, maxima: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ids and values of the k largest of each row, falling, equals by rising id. Of equals at the edge any may be left
    out. maxima: (rows, groups) of the groups of ids. rows: (rows, 1) of `values`; None: all, in order."""
    if k <= _MAX_TOP_K + _EDGE and k < maxima.shape[1]:
        ids = _ids_of(torch.topk(maxima, k).indices.sort(dim=1).values)
        candidates = _gathered(values, ids, rows)
        best = torch.topk(candidates, k)
        found, at = best.values, ids.gather(1, best.indices)
    else:
        best = torch.topk(values if rows is None else values[rows[:, 0]], k)
        found, at = best.values, best.indices
    at, order = at.sort(dim=1)
    found, by_value = found.gather(1, order).sort(dim=1, descending=True, stable=True)
    return at.gather(1, by_value), found


def _group_maxima(scores: Tensor) -> Tensor:
    """(rows, groups): the largest logit of each group of ids; the last group may be smaller."""
    vocab = scores.shape[1]
    whole = vocab - vocab % GROUP
    maxima = torch.unflatten(scores[:, :whole], 1, (whole // GROUP, GROUP)).amax(2) if whole else scores[:, :0]
    return maxima if whole == vocab else torch.cat((maxima, scores[:, whole:].amax(1, keepdim=True)), 1)


def _ids_of(groups: Tensor) -> Tensor:
    """(rows, n) groups → (rows, n * GROUP) ids; the last group's may be beyond the vocabulary."""
    return (groups[:, :, None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten(1)


def _gathered(scores: Tensor, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """Logits of ids, -inf for those beyond the vocabulary. rows: as of `_largest`."""
    vocab = scores.shape[1]
    within = ids.clamp(max=vocab - 1)
    found = scores.gather(1, within) if rows is None else scores[rows, within]
    return found if vocab % GROUP == 0 else found.masked_fill_(ids >= vocab, -torch.inf)


def _rows(tensor: Tensor, which: Sequence[int]) -> Tensor:
    """Some rows; the tensor itself for all of them."""
    return tensor if len(which) == len(tensor) else tensor[list(which)]


def _inverse_temperatures(rows: Sequence[RowSampling], device: torch.device) -> Tensor:
    """(rows, 1)"""
    values = [1.0 / row.params.temperature for row in rows]
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _change(scores: Tensor, row: RowSampling) -> None:
    """Constraint, repetition penalty, bias and penalties, in place. scores: (vocab,)"""
    vocab, params = len(scores), row.params
    if row.allowed is not None:
        allowed = torch.from_numpy(np.ascontiguousarray(row.allowed[:vocab])).to(scores.device)
        scores.masked_fill_(~allowed, -torch.inf)
    if params.repetition_penalty != 1.0:
        repeated = repeated_ids(row.counts, row.prompt)
        ids = torch.from_numpy(repeated[repeated < vocab].astype(np.int64)).to(scores.device)
        before = scores[ids]
        scores[ids] = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
    shifts = {token: shift for token, shift in logit_shifts(params, row.counts).items() if shift and token < vocab}
    if shifts:
        ids = torch.tensor(list(shifts), device=scores.device)
        scores[ids] += torch.tensor(list(shifts.values()), dtype=scores.dtype, device=scores.device)
