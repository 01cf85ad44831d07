"""Rows of several branches, mixed and sampled where the logits are: twin of `core.aggregation.branches`.

Each branch's probabilities are made once; a row's weights follow from its parent's, on the host, where rescoring wants
them. The mixture's logarithms then go through `BatchSampler`, which leaves to the reference what rounding could decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.aggregation.branches import (
    BranchMixture,
    Evidence,
    row_evidence,
    row_log_weights,
    sample_mixed_row,
)
from paceline.core.aggregation.weights import softmax
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.sampling.batch_sampler import BatchSampler, tops_of
from paceline.engine.sampling.logits_processor import inverse_temperatures, process
from paceline.engine.sampling.margins import UNDERFLOW
from paceline.engine.sampling.workspace import Workspace
from paceline.engine.tensors import dists

_NO_CHANGES = SamplingParams()
_CHUNK = 16  # rows at a time: a buffer of each branch, 10 MB with 152,000 ids


@dataclass(slots=True, eq=False)
class MixedRows:
    """The rows of one request, all branches."""

    rows: Sequence[RowSampling]
    mixture: BranchMixture
    logits: Sequence[Sequence[tuple[Tensor, int]]]  # (branches, rows): a tensor of logits, and a row of it


class _Progress:
    """Evidence of one request's rows so far, and the probabilities that its later rows depend on."""

    def __init__(self, request: MixedRows) -> None:
        self.request = request
        self.evidence: list[Evidence] = []
        self.child_probs: dict[int, list[float]] = {}  # row -> its token's probability after its parent, by branch
        self.children: dict[int, list[int]] = {}
        for row, parent in enumerate(request.mixture.parents):
            self.children.setdefault(parent, []).append(row)


class MixtureSampler:
    """For one thread."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler
        self._workspace = Workspace()
        self.referred = 0  # rows left to the reference

    def sample(self, requests: Sequence[MixedRows]) -> list[tuple[SampledRow, ...]]:
        """The rows of all requests, of equally many branches each."""
        progress = [_Progress(request) for request in requests]
        places = [(each, row) for each in progress for row in range(len(each.request.rows))]
        found: list[SampledRow] = []
        with torch.inference_mode():
            for first in range(0, len(places), _CHUNK):
                found += self._chunk(places[first : first + _CHUNK])
        remaining = iter(found)
        return [tuple(next(remaining) for _ in request.rows) for request in requests]

    def _chunk(self, places: Sequence[tuple[_Progress, int]]) -> list[SampledRow]:
        rows = [each.request.rows[row] for each, row in places]
        num_branches = len(places[0][0].request.mixture.log_weights)
        scores = [self._scores(branch, places, rows[0].vocab_size) for branch in range(num_branches)]
        low = torch.zeros(len(rows), dtype=torch.bool, device=scores[0].device)
        for branch in scores:
            low |= _mask(branch, rows)
        probs = [
            torch.softmax(branch, -1, out=self._workspace.buffer(f"probs {index}", branch))
            for index, branch in enumerate(scores)
        ]
        weights = self._weights(places, probs)
        device = scores[0].device
        mixed = self._mixed("mixed", probs, weights)
        tops: list[Dist | None] = tops_of(mixed, rows) if any(row.num_top for row in rows) else [None] * len(rows)
        if any(_is_processed(row) for row in rows):
            mixed = self._mixed("mixed", self._processed(scores, places), weights)
        plain = [replace(row, params=_without_temperature(row)) for row in rows]
        tokens = self._sampler.tokens(mixed.log_(), plain, [True] * len(rows))
        tokens = [None if under else token for token, under in zip(tokens, low.tolist(), strict=True)]
        settled = [
            self._referred(place) if token is None else token for place, token in zip(places, tokens, strict=True)
        ]
        ids = torch.tensor(settled, device=device)[:, None]
        token_probs = torch.cat([each.gather(1, ids) for each in probs], 1).double().tolist()
        return [
            SampledRow(token, top, tuple(each)) for token, top, each in zip(settled, tops, token_probs, strict=True)
        ]

    def _scores(self, branch: int, places: Sequence[tuple[_Progress, int]], vocab_size: int) -> Tensor:
        """(rows, vocab) float32: copies of the branch's logits."""
        device = places[0][0].request.logits[branch][0][0].device
        buffer = self._workspace.rows(f"scores {branch}", len(places), vocab_size, device)
        for target, (each, row) in zip(buffer, places, strict=True):
            tensor, at = each.request.logits[branch][row]
            target.copy_(tensor[at, :vocab_size])
        return buffer

    def _weights(self, places: Sequence[tuple[_Progress, int]], probs: Sequence[Tensor]) -> Tensor:
        """(rows, branches). A row's parent is in this chunk, or was in an earlier one."""
        wanted = [(at, each, child) for at, (each, row) in enumerate(places) for child in each.children.get(row, ())]
        if wanted:
            rows = torch.tensor([at for at, _, _ in wanted], device=probs[0].device)
            ids = torch.tensor([each.request.mixture.tokens[child] for _, each, child in wanted], device=rows.device)
            values = torch.stack([branch[rows, ids] for branch in probs], 1).double().tolist()
            for (_, each, child), value in zip(wanted, values, strict=True):
                each.child_probs[child] = value
        weights: list[list[float]] = []
        for each, row in places:
            mixture = each.request.mixture
            each.evidence.append(row_evidence(mixture, row, each.evidence, each.child_probs.get(row, ())))
            weights.append(softmax(row_log_weights(mixture, each.evidence[row])))
        return torch.tensor(weights, dtype=torch.float32, device=probs[0].device)

    def _mixed(self, name: str, probs: Sequence[Tensor], weights: Tensor) -> Tensor:
        mixed = torch.mul(probs[0], weights[:, :1], out=self._workspace.buffer(name, probs[0]))
        for branch, each in enumerate(probs[1:], 1):
            mixed.addcmul_(each, weights[:, branch : branch + 1])
        return mixed

    def _processed(self, scores: Sequence[Tensor], places: Sequence[tuple[_Progress, int]]) -> list[Tensor]:
        """Each branch's probabilities after penalties and temperature. Changes the scores."""
        rows = [each.request.rows[row] for each, row in places]
        neutral = [
            row if row.params.temperature else replace(row, params=replace(row.params, temperature=1.0)) for row in rows
        ]
        inverse = inverse_temperatures(neutral, scores[0].device).float()
        found: list[Tensor] = []
        for branch, values in enumerate(scores):
            for target, (each, row) in zip(values, places, strict=True):
                wanted = each.request.rows[row]
                if wanted.changes_logits:
                    process(target, replace(wanted, allowed=None, prompt=each.request.mixture.prompts[branch]))
            values.mul_(inverse)
            found.append(torch.softmax(values, -1, out=values))
        return found

    def _referred(self, place: tuple[_Progress, int]) -> int:
        self.referred += 1
        each, row = place
        request = each.request
        found = [dists(branch[row][0][branch[row][1]][None])[0] for branch in request.logits]
        return sample_mixed_row(found, request.rows[row], request.mixture, each.evidence[row]).token


def _mask(scores: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Apply the rows' constraints in place. (rows,): all allowed ids are so unlikely that they may look equal."""
    low = torch.zeros(len(rows), dtype=torch.bool, device=scores.device)
    for at, row in enumerate(rows):
        if row.allowed is not None:
            best = scores[at].max()
            process(scores[at], replace(row, params=_NO_CHANGES))
            low[at] = scores[at].max() < best - UNDERFLOW
    return low


def _is_processed(row: RowSampling) -> bool:
    """True if penalties, bias or the temperature change the branches' probabilities."""
    changes = bool(row.params.logit_bias) or row.params.looks_back
    return changes or row.params.temperature not in (0.0, 1.0)


def _without_temperature(row: RowSampling) -> SamplingParams:
    """What is left to do for a mixture: top-k, top-p, min-p and noise; greedy stays greedy."""
    return row.params if row.params.temperature in (0.0, 1.0) else replace(row.params, temperature=1.0)
