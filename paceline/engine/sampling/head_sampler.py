"""Heads of rows, where the logits are: torch's twin of `core.sampling.row_head` and of `evidence_head`.

Which ids a head has may differ from the reference's at its edges; its bounds hold for all that it lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.aggregation.weights import NEGLIGIBLE_PROB
from paceline.core.sampling.dist import Dist, ProbArray
from paceline.core.sampling.noise import row_keys
from paceline.core.sampling.row import HEAD_BY_PROB, HEAD_BY_SCORE, RowHead, RowSampling
from paceline.engine.sampling.groups import gathered, group_maxima, ids_of, largest, some_rows
from paceline.engine.sampling.noise import GroupNoise
from paceline.engine.sampling.transfers import Rounds, to_device, to_host

_GROUPS = 48  # with the highest bounds, searched for the best scores
_EVIDENT = 64  # ids of a branch that are read first; rarely are more of them evident


def row_heads(logs: Tensor, rows: Sequence[RowSampling]) -> Rounds[list[RowHead]]:
    """logs: (rows, vocab) log-probabilities after processing."""
    maxima = group_maxima(logs)
    vocab = logs.shape[1]
    found, values = largest(logs, maxima, min(HEAD_BY_PROB, vocab))
    drawn = [row for row, wanted in enumerate(rows) if wanted.params.temperature > 0.0]
    by_score: list[Tensor] = []
    if drawn:
        by_score = _best_scores(some_rows(logs, drawn), some_rows(maxima, drawn), [rows[row] for row in drawn])
    likely, log_probs, *of_drawn = yield [found, values.double(), *by_score]
    # At temperature 0 the most probable ids are the best, and bound all others.
    best, best_logs, scores = (each[:, :HEAD_BY_SCORE].copy() for each in (likely, log_probs, log_probs))
    max_scores = log_probs[:, -1].copy()
    for array, some in zip((best, best_logs, scores, max_scores), of_drawn, strict=bool(drawn)):
        array[drawn] = some
    heads: list[RowHead] = []
    for row in range(len(rows)):
        ids, at = np.unique(np.concatenate((likely[row], best[row])), return_index=True)
        dist = _dist(ids, np.exp(np.concatenate((log_probs[row], best_logs[row]))[at]))
        places = np.searchsorted(ids, best[row])
        if vocab <= HEAD_BY_PROB:
            heads.append(RowHead(dist, places, scores[row], -math.inf, 0.0))
        else:
            max_prob = float(np.exp(log_probs[row, -1]))
            heads.append(RowHead(dist, places, scores[row], float(max_scores[row]), max_prob))
    return heads


def _best_scores(logs: Tensor, maxima: Tensor, rows: Sequence[RowSampling]) -> list[Tensor]:
    """(rows, ids) with the best scores, falling, their log-probabilities and scores, and (rows,) a bound for all
    others."""
    keys = row_keys([row.params.seed for row in rows], [row.position for row in rows])
    noise = GroupNoise(to_device(keys.view(np.int64), logs.device), maxima.shape[1])
    bounds = maxima.double() - torch.log(noise.least)
    highest = torch.topk(bounds, min(_GROUPS + 1, bounds.shape[1]))
    groups = highest.indices[:, :_GROUPS]
    ids = ids_of(groups)
    values = gathered(logs, ids)
    scores = values.double() + noise.gumbel(groups, torch.arange(len(rows), device=logs.device))
    best = torch.topk(scores, min(HEAD_BY_SCORE + 1, scores.shape[1]))
    kept = best.indices[:, : min(HEAD_BY_SCORE, logs.shape[1])]
    others = best.values[:, -1]
    if highest.values.shape[1] > _GROUPS:
        others = torch.maximum(others, highest.values[:, _GROUPS])
    return [ids.gather(1, kept), values.gather(1, kept).double(), best.values[:, : kept.shape[1]], others]


def evidence_heads(probs: Tensor) -> Rounds[list[Dist]]:
    """What `decayed_evidence` can depend on. probs: (rows, vocab) of one branch."""
    found, values = largest(probs, group_maxima(probs), min(_EVIDENT, probs.shape[1]))
    ids, known = yield [found, values.double()]
    heads: list[Dist] = []
    for row in range(len(probs)):
        kept = known[row] > NEGLIGIBLE_PROB
        if kept.all() and probs.shape[1] > _EVIDENT:
            places = torch.nonzero(probs[row] > NEGLIGIBLE_PROB)[:, 0]
            heads.append(_sorted(*to_host([places, probs[row][places].double()])))
        else:
            heads.append(_sorted(ids[row][kept], known[row][kept]))
    return heads


def _sorted(ids: NDArray[np.int64], probs: ProbArray) -> Dist:
    order = np.argsort(ids)
    return _dist(ids[order], probs[order])


def _dist(ids: NDArray[np.int64], probs: ProbArray) -> Dist:
    return Dist(ids.astype(np.int32), probs, max(1.0 - float(probs.sum()), 0.0))
