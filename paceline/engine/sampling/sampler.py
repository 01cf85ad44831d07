"""Answers to `Engine.sample` from logits that stay on the model's device: rows, and rows of several branches, mixed.

A mixture is the twin of `core.aggregation.weights`. Each branch's probabilities are made once; a row's weights follow
from its parent's, on the host, where rescoring wants them. The mixture's logarithms then go through `BatchSampler`,
which leaves to the reference what rounding could decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from paceline.core.aggregation.weights import (
    NEGLIGIBLE_PROB,
    BranchMixture,
    Evidence,
    masked,
    row_evidence,
    row_log_weights,
    sample_mixed_row,
    softmax,
)
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import (
    HEAD_BY_PROB,
    HEAD_BY_SCORE,
    NOT_SAMPLED,
    RowHead,
    RowSampling,
    RowTree,
    SampledRow,
    SamplingParams,
)
from paceline.engine.base import Logits, SampleRequest
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.sampling.open_sampler import GroupScores
from paceline.engine.sampling.workspace import (
    UNDERFLOW,
    Array,
    Pending,
    Workspace,
    answers_of,
    group_maxima,
    inverse_temperatures,
    is_remote,
    largest,
    may_revive,
    process,
    some_rows,
    to_device,
    to_host,
)
from paceline.engine.tensors import dists

_GROUPS = 48  # with the highest bounds, searched for the best scores
_EVIDENT = 64  # ids of a branch that are read first; rarely are more of them evident


def row_heads(logs: Tensor, rows: Sequence[RowSampling]) -> Pending[list[RowHead]]:
    """Heads as of `core.sampling.sampler.row_head`. logs: (rows, vocab) log-probabilities after processing.

    Which ids a head has may differ from the reference's at its edges; its bounds hold for all that it lacks.
    """
    maxima = group_maxima(logs)
    vocab = logs.shape[1]
    found, values = largest(logs, maxima, min(HEAD_BY_PROB, vocab))
    drawn = [row for row, wanted in enumerate(rows) if wanted.params.temperature > 0.0]
    by_score: list[Tensor] = []
    if drawn:
        chosen, device = [rows[row] for row in drawn], logs.device
        inverse = torch.ones((len(drawn), 1), dtype=torch.float64, device=device)
        scores = GroupScores(some_rows(logs, drawn), some_rows(maxima, drawn), chosen, inverse)
        by_score = scores.best(range(len(drawn)), _GROUPS, HEAD_BY_SCORE + 1)

    def finish(seen: Sequence[Array]) -> list[RowHead]:
        likely, log_probs, *of_drawn = seen
        # At temperature 0 the most probable ids are the best, and bound all others.
        best, best_logs, scores = (each[:, :HEAD_BY_SCORE].copy() for each in (likely, log_probs, log_probs))
        max_scores = log_probs[:, -1].copy()
        if of_drawn:
            ids, their_scores, logs_of_drawn, others = of_drawn
            kept = best.shape[1]
            best[drawn], best_logs[drawn], scores[drawn] = (
                each[:, :kept] for each in (ids, logs_of_drawn, their_scores)
            )
            max_scores[drawn] = np.maximum(their_scores[:, -1], others)
        heads: list[RowHead] = []
        for row in range(len(rows)):
            ids, at = np.unique(np.concatenate((likely[row], best[row])), return_index=True)
            dist = Dist.head(ids, np.exp(np.concatenate((log_probs[row], best_logs[row]))[at]))
            places = np.searchsorted(ids, best[row])
            if vocab <= HEAD_BY_PROB:
                heads.append(RowHead(dist, places, scores[row], -math.inf, 0.0))
            else:
                max_prob = float(np.exp(log_probs[row, -1]))
                heads.append(RowHead(dist, places, scores[row], float(max_scores[row]), max_prob))
        return heads

    return Pending([found, values.double(), *by_score], finish)


def evidence_heads(probs: Tensor) -> Pending[list[Dist]]:
    """What `decayed_evidence` can depend on. probs: (rows, vocab) of one branch."""

    def finish(found: Sequence[Array]) -> list[Dist]:
        ids, known = found
        heads: list[Dist] = []
        for row in range(len(probs)):
            kept = known[row] > NEGLIGIBLE_PROB
            if kept.all() and probs.shape[1] > _EVIDENT:
                places = torch.nonzero(probs[row] > NEGLIGIBLE_PROB)[:, 0]
                heads.append(Dist.head(*to_host([places, probs[row][places].double()])))
            else:
                heads.append(Dist.head(ids[row][kept], known[row][kept]))
        return heads

    ids, values = largest(probs, group_maxima(probs), min(_EVIDENT, probs.shape[1]))
    return Pending([ids, values.double()], finish)


_NO_CHANGES = SamplingParams()
_LEAST_TEMPERATURE = 0.05  # below, float32's rounding is magnified beyond `MARGIN` and `HEAD_ERROR`
_CHUNK = 16  # rows at a time: a buffer of each branch, 10 MB with 152,000 ids


class MixedRows:
    """The rows of one request, all branches, and what is known of them so far."""

    def __init__(
        self, rows: Sequence[RowSampling], mixture: BranchMixture, logits: Sequence[Sequence[tuple[Tensor, int]]]
    ) -> None:
        """logits: (branches, rows) a tensor of logits, and a row of it"""
        self.rows, self.mixture, self.logits = rows, mixture, logits
        self.evidence: list[Evidence] = []
        self.child_probs: dict[int, list[float]] = {}  # row -> its token's probability after its parent, by branch
        self.children: dict[int, list[int]] = {}
        for row, parent in enumerate(mixture.parents):
            self.children.setdefault(parent, []).append(row)


class MixtureSampler:
    """For one thread."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler
        self._workspace = Workspace()

    def sample(self, requests: Sequence[MixedRows]) -> list[tuple[SampledRow, ...]]:
        """The rows of all requests, of equally many branches each."""
        places = [(each, row) for each in requests for row in range(len(each.rows))]
        found: list[SampledRow] = []
        with torch.inference_mode():
            for first in range(0, len(places), _CHUNK):
                found += self._chunk(places[first : first + _CHUNK])
        remaining = iter(found)
        return [tuple(next(remaining) for _ in request.rows) for request in requests]

    def _chunk(self, places: Sequence[tuple[MixedRows, int]]) -> list[SampledRow]:
        rows = [each.rows[row] for each, row in places]
        num_branches = len(places[0][0].mixture.log_weights)
        scores = [self._scores(branch, places, rows[0].vocab_size) for branch in range(num_branches)]
        low = to_device([0.0 < row.params.temperature < _LEAST_TEMPERATURE for row in rows], scores[0].device)
        best = [branch.amax(1, keepdim=True) for branch in scores]
        for branch in scores:
            low |= _mask(branch, rows)
        probs = [
            torch.softmax(branch, -1, out=self._workspace.buffer(f"probs {index}", branch))
            for index, branch in enumerate(scores)
        ]
        weights = self._weights(places, probs, low)
        mixed = self._mixed("mixed", probs, weights)
        plain_mixture = self._unmasked(mixed, places, weights) if any(row.num_top for row in rows) else None
        if any(_is_processed(row) for row in rows):
            mixed = self._mixed("processed", self._processed(scores, places, best, low), weights)
        logs = mixed.log() if mixed is plain_mixture else mixed.log_()
        plain = [msgspec.structs.replace(row, params=_without_temperature(row)) for row in rows]
        tokens, tops = self._sampler.decided(logs, plain, [True] * len(rows), plain_mixture, low)
        settled = [
            self._referred(place) if token is None else token for place, token in zip(places, tokens, strict=True)
        ]
        ids = to_device(settled, scores[0].device)[:, None]
        token_probs = torch.cat([each.gather(1, ids) for each in probs], 1).double()
        wanted = [at for at, (each, _) in enumerate(places) if each.mixture.heads]
        waiting: list[Pending[Any]] = [Pending([token_probs, low], list)]
        if wanted:
            waiting.append(row_heads(some_rows(logs, wanted), [rows[at] for at in wanted]))
            if any(places[at][0].mixture.rescoring for at in wanted):
                waiting += [evidence_heads(some_rows(branch, wanted)) for branch in probs]
        (seen_probs, is_low), *of_wanted = answers_of(waiting)
        found = [
            SampledRow(token, top, tuple(each))
            for token, top, each in zip(settled, tops, seen_probs.tolist(), strict=True)
        ]
        for at, head, *branch_heads in zip(wanted, *of_wanted, strict=True):
            each, row = places[at]
            # Where float32 may see the allowed ids as equals, or as impossible, there is no head.
            found[at] = msgspec.structs.replace(
                found[at],
                head=None if is_low[at] else head,
                branch_heads=tuple(branch_heads) if each.mixture.rescoring else (),
                dists=partial(_read, each, row),
            )
        return found

    def _unmasked(self, mixed: Tensor, places: Sequence[tuple[MixedRows, int]], weights: Tensor) -> Tensor:
        """(rows, vocab) the mixture before constraints. mixed: after them."""
        masked = [at for at, (each, row) in enumerate(places) if each.rows[row].allowed is not None]
        if not masked:
            return mixed
        plain = self._workspace.buffer("unmasked", mixed).copy_(mixed)
        for at in masked:
            each, row = places[at]
            branches = [branch[row] for branch in each.logits]
            logits = torch.stack([tensor[index, : mixed.shape[1]].float() for tensor, index in branches])
            torch.mv(torch.softmax(logits, -1).T, weights[at], out=plain[at])
        return plain

    def _scores(self, branch: int, places: Sequence[tuple[MixedRows, int]], vocab_size: int) -> Tensor:
        """(rows, vocab) float32: copies of the branch's logits."""
        device = places[0][0].logits[branch][0][0].device
        buffer = self._workspace.rows(f"scores {branch}", len(places), vocab_size, device)
        for target, (each, row) in zip(buffer, places, strict=True):
            tensor, at = each.logits[branch][row]
            target.copy_(tensor[at, :vocab_size])
        return buffer

    def _weights(self, places: Sequence[tuple[MixedRows, int]], probs: Sequence[Tensor], low: Tensor) -> Tensor:
        """(rows, branches). A row's parent is in this chunk, or was in an earlier one. low: (rows,) as of `_mask`."""
        wanted = [(at, each, child) for at, (each, row) in enumerate(places) for child in each.children.get(row, ())]
        if wanted:
            rows = to_device([at for at, _, _ in wanted], probs[0].device)
            ids = to_device([each.mixture.tokens[child] for _, each, child in wanted], rows.device)
            values, are_low = to_host([torch.stack([branch[rows, ids] for branch in probs], 1).double(), low[rows]])
            for (at, each, child), value, is_low in zip(wanted, values.tolist(), are_low.tolist(), strict=True):
                each.child_probs[child] = _child_probs(*places[at], child) if is_low else value
        weights: list[list[float]] = []
        for each, row in places:
            mixture = each.mixture
            each.evidence.append(row_evidence(mixture, row, each.evidence, each.child_probs.get(row, ())))
            weights.append(softmax(row_log_weights(mixture.log_weights, each.evidence[row])))
        return to_device(np.array(weights, dtype=np.float32), probs[0].device)

    def _mixed(self, name: str, probs: Sequence[Tensor], weights: Tensor) -> Tensor:
        mixed = torch.mul(probs[0], weights[:, :1], out=self._workspace.buffer(name, probs[0]))
        for branch, each in enumerate(probs[1:], 1):
            mixed.addcmul_(each, weights[:, branch : branch + 1])
        return mixed

    def _processed(
        self, scores: Sequence[Tensor], places: Sequence[tuple[MixedRows, int]], best: Sequence[Tensor], low: Tensor
    ) -> list[Tensor]:
        """Each branch's probabilities after penalties and temperature. Changes the scores, and `low` as `_mask` does.
        best: of each branch (rows, 1) the largest logits before constraints."""
        rows = [each.rows[row] for each, row in places]
        inverse = inverse_temperatures(rows, scores[0].device).float()
        found: list[Tensor] = []
        for branch, values in enumerate(scores):
            changed = [at for at, row in enumerate(rows) if row.params.logit_bias or row.params.looks_back]
            before = some_rows(values, changed).clone() if changed else values
            for at in changed:
                prompt = places[at][0].mixture.prompts[branch]
                process(values[at], msgspec.structs.replace(rows[at], allowed=None, prompt=prompt))
            if changed:
                which = to_device(changed, low.device)
                low[which] |= may_revive(before, some_rows(values, changed), best[branch][which])
            # The best becomes 0, since float32's rounding of what is near it would be magnified by the temperature.
            values.sub_(values.amax(1, keepdim=True)).mul_(inverse)
            found.append(torch.softmax(values, -1, out=values))
        return found

    @staticmethod
    def _referred(place: tuple[MixedRows, int]) -> int:
        each, row = place
        mixture = replace(each.mixture, heads=False)
        return sample_mixed_row(_read(each, row), each.rows[row], mixture, each.evidence[row]).token


def _child_probs(request: MixedRows, row: int, child: int) -> list[float]:
    """The reference's probabilities of a child's token after this row, by branch, where float32's may be others."""
    return [masked(dist, request.rows[row]).prob(request.mixture.tokens[child]) for dist in _read(request, row)]


def _read(request: MixedRows, row: int) -> tuple[Dist, ...]:
    """A row's distribution in each branch."""
    return tuple(dists(branch[row][0][branch[row][1]][None])[0] for branch in request.logits)


def _mask(scores: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Apply the rows' constraints in place. (rows,): all allowed ids are so unlikely that they may look equal."""
    low = torch.zeros(len(rows), dtype=torch.bool, device=scores.device)
    for at, row in enumerate(rows):
        if row.allowed is not None:
            best = scores[at].max()
            process(scores[at], msgspec.structs.replace(row, params=_NO_CHANGES))
            low[at] = scores[at].max() < best - UNDERFLOW
    return low


def _is_processed(row: RowSampling) -> bool:
    """True if penalties, bias or the temperature change the branches' probabilities."""
    changes = bool(row.params.logit_bias) or row.params.looks_back
    return changes or row.params.temperature not in (0.0, 1.0)


def _without_temperature(row: RowSampling) -> SamplingParams:
    """Parameters of the mixture itself: top-k, top-p, min-p and noise; greedy stays greedy."""
    return row.params if row.params.temperature in (0.0, 1.0) else replace(row.params, temperature=1.0)


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
