"""Changes of logits before sampling: constraint, repetition penalty, bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.sampling.row import RowSampling
from paceline.core.sampling.sampler import logit_shifts, repeated_ids


def process(scores: Tensor, row: RowSampling) -> None:
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


def inverse_temperatures(rows: Sequence[RowSampling], device: torch.device) -> Tensor:
    """(rows, 1)"""
    values = [1.0 / row.params.temperature for row in rows]
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
