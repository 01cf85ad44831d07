"""Changes of logits before sampling: constraint, repetition penalty, bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.sampling.row import RowSampling
from paceline.core.sampling.sampler import logit_shifts, repeated_ids
from paceline.engine.sampling.transfers import to_device


def process(scores: Tensor, row: RowSampling) -> None:
    """Constraint, repetition penalty, bias and penalties, in place. scores: (vocab,)"""
    vocab, params = len(scores), row.params
    if row.allowed is not None:
        allowed = to_device(np.ascontiguousarray(row.allowed[:vocab]), scores.device)
        scores.masked_fill_(~allowed, -torch.inf)
    if params.repetition_penalty != 1.0:
        repeated = repeated_ids(row.counts, row.prompt)
        ids = to_device(repeated[repeated < vocab].astype(np.int64), scores.device)
        before = scores[ids]
        scores[ids] = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
    shifts = {token: shift for token, shift in logit_shifts(params, row.counts).items() if shift and token < vocab}
    if shifts:
        ids = to_device(list(shifts), scores.device)
        scores[ids] += to_device(list(shifts.values()), scores.device).to(scores.dtype)


def moved_ids(row: RowSampling) -> set[int]:
    """Ids whose logits `process` moves; those that it forbids are not among them."""
    moved = {token for token, shift in logit_shifts(row.params, row.counts).items() if shift}
    if row.params.repetition_penalty != 1.0:
        moved.update(repeated_ids(row.counts, row.prompt).tolist())
    return moved


def inverse_temperatures(rows: Sequence[RowSampling], device: torch.device) -> Tensor:
    """(rows, 1)"""
    values = [1.0 / row.params.temperature for row in rows]
    return to_device(np.array(values, dtype=np.float64), device)[:, None]
