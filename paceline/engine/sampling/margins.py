"""How near two values must be for rounding to decide between them; such rows are left to the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling.row import RowSampling
from paceline.engine.sampling.transfers import is_remote

MARGIN = 1e-4  # nats between scores: far more than float32's rounding of logits and softmax
ROUNDING = 1e-6  # nats: that rounding itself, which a temperature below 1 magnifies
DISTINCT = 1e-5  # nats: logits that differ by more have different probabilities in float32
UNDERFLOW = 80.0  # nats below the best: probabilities in float32 may be 0 there


def margins(rows: Sequence[RowSampling]) -> NDArray[np.float64]:
    """(rows,) `MARGIN` of scores and of a row's probability, and more of it at low temperatures."""
    temperatures = np.array([row.params.temperature or 1.0 for row in rows])
    return np.maximum(MARGIN, ROUNDING / temperatures)


def may_revive(plain: Tensor, scores: Tensor, best: Tensor) -> Tensor:
    """(rows,) True where an id may be chosen to which the reference, by its model's own probability in float32, gives
    none. plain, scores: (rows, vocab) before and after changes. best: (rows, 1) the model's own largest logits."""
    floor = best - UNDERFLOW
    if not is_remote(plain.device) and bool((plain.amin(1, keepdim=True) >= floor).all()):
        return torch.zeros(len(plain), dtype=torch.bool, device=plain.device)
    lost = scores.masked_fill(plain >= floor, -torch.inf).amax(1)
    top = scores.amax(1)
    return (lost > top - UNDERFLOW) | (top == -torch.inf)
