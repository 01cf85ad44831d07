"""Fingerprints of embedders' weights, by which two sides tell whether their cosines can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLES = 4096  # values of each tensor: other training changes nearly all of them


def weights_fingerprint(weights: Iterable[Tensor], pooling: str) -> str:
    """64 hex digits, of a sample of the weights and of how the vectors of a text are pooled.

    Names do not count: files and libraries keep the same weights under different ones. Not told apart: models that
    differ only in a text that is put before a query. Weights in another number format count as others.
    """
    parts = sorted(_digest(tensor) for tensor in weights if tensor.is_floating_point())
    return hashlib.sha256(b"".join((pooling.encode(), *parts))).hexdigest()


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, len(flat) // _SAMPLES)].float().cpu().numpy().astype("<f4")
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + sample.tobytes()).digest()
