"""Buffers that a sampler keeps between calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.sampling.row import RowSampling
from paceline.engine.sampling.logits_processor import inverse_temperatures
from paceline.engine.sampling.transfers import to_device


class Workspace:
    """Float32 buffers by name. A fresh one would cost more in page faults than what fills it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """The buffer of this name in this shape, on this device; its contents are those of the last use."""
        return self.rows(name, like.shape[0], like.shape[1], like.device)

    def rows(self, name: str, count: int, width: int, device: torch.device) -> Tensor:
        """`buffer` by its shape."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count * width or buffer.device != device:
            self._buffers[name] = buffer = torch.empty(count * width, device=device)
        return buffer[: count * width].view(count, width)

    def picked(self, scores: Tensor, which: Sequence[int]) -> Tensor:
        """Copies of some rows, valid until the next call; the tensor itself for all of them."""
        if len(which) == len(scores):
            return scores
        index = to_device(which, scores.device)
        return torch.index_select(scores, 0, index, out=self.buffer("picked", scores[: len(which)]))

    def softmax(self, scores: Tensor, rows: Sequence[RowSampling]) -> Tensor:
        """(rows, vocab), at the rows' temperatures; valid until the next call."""
        probs = self.buffer("probs", scores)
        if any(row.params.temperature != 1.0 for row in rows):
            torch.mul(scores, inverse_temperatures(rows, scores.device).float(), out=probs)
            scores = probs
        return torch.softmax(scores, -1, out=probs)
