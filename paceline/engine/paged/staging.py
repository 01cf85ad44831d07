"""Host memory from which the integers of a step reach the device in one copy.

On a GPU the memory is pinned and the copy asynchronous: a buffer is filled again only after its copy has ended, and
there are two, so nothing waits. On a CPU the same calls copy at once.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

_BUFFERS = 2
_LEAST = 1 << 16  # bytes


class Staging:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * _BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._current = 0
        self.copies = 0  # sent so far

    def buffer(self, size: int) -> Bytes:
        """Memory of `size` bytes to fill; its contents are those of an earlier step. Ends with `send`."""
        self._current = (self._current + 1) % _BUFFERS
        copied = self._copied[self._current]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[self._current]) < size:
            grown = max(_LEAST, size + size // 2)
            self._buffers[self._current] = torch.empty(grown, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        filled: Bytes = self._buffers[self._current][:size].numpy()
        return filled

    def send(self, size: int, into: Tensor | None = None) -> Tensor:
        """The buffer's first bytes on the device, in fresh memory or at the beginning of `into`."""
        if into is None:
            into = torch.empty(size, dtype=torch.uint8, device=self.device)
        into[:size].copy_(self._buffers[self._current][:size], non_blocking=True)
        if self._pinned:
            event = self._copied[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record()
            self._copied[self._current] = event
        self.copies += 1
        return into
