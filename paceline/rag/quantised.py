"""The encoder of `paceline.encoder` with weights and inputs of 8 bits, by a kernel in C (`encoder_kernel.c`): a quarter
of its time.

Each output's weights have a scale, and each row of inputs has another, rounded when it is met. Where a column of inputs
is large, as the norm before it says, it is divided and its weights are multiplied: by the root of what would make both
alike (Xiao et al. 2023, with the norm's weight in place of measured inputs). Vectors of texts have a cosine of 0.998
with those of float32. A row does not depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from paceline.encoder import EPSILON, LAYERS, POSITIONS, WIDTH, WORDS, Floats

if TYPE_CHECKING:
    from types import ModuleType

_BLOCK: Final = 16  # outputs whose weights lie together, four inputs of each
_HALF: Final = 0.5
_OUTLYING: Final = 3.0  # a normed input is rarely larger

Buffers = tuple[NDArray[np.generic], ...]


@cache
def kernel() -> ModuleType | None:
    """The module in C, or None where it was not built, or runs on other processors only."""
    try:
        module = import_module("paceline.rag._encoder_kernel")
    except ModuleNotFoundError:
        return None
    return module if module.is_supported() else None


class QuantisedEncoder:
    """Safe to use from several threads, which compute side by side."""

    def __init__(self, weights: Mapping[str, Floats], kernel: ModuleType) -> None:
        self._kernel = kernel
        self._first = {name: weights[name] for name in (WORDS, POSITIONS)}
        self._kind = weights["embeddings.token_type_embeddings.weight"][0]
        self._norm = _norm(weights, "embeddings.LayerNorm")
        self._layers = [_layer(weights, i) for i in range(LAYERS)]

    def outputs(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Outputs of the last layer (tokens of all texts, WIDTH), one text after another. texts: their token ids."""
        lengths = [len(text) for text in texts]
        positions = np.concatenate([np.arange(length) for length in lengths])
        hidden: Floats = self._first[WORDS][np.concatenate(texts)] + self._first[POSITIONS][positions] + self._kind
        hidden -= hidden.mean(1, keepdims=True)
        hidden /= np.sqrt(np.einsum("ij,ij->i", hidden, hidden) / WIDTH + EPSILON)[:, None]
        hidden *= self._norm[0]
        hidden += self._norm[1]
        for layer in self._layers:
            self._kernel.run_layer(hidden, np.array(lengths, np.int32), layer)
        return hidden


def _norm(weights: Mapping[str, Floats], name: str) -> tuple[Floats, Floats]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _layer(weights: Mapping[str, Floats], number: int) -> Buffers:
    """Buffers of one layer, in the order in which the kernel takes them."""
    layer = f"encoder.layer.{number}"
    before = f"encoder.layer.{number - 1}.output.LayerNorm" if number else "embeddings.LayerNorm"
    between, after = f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"
    parts = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
    return (
        *_matrix(weights, parts, before),
        *_matrix(weights, [f"{layer}.attention.output.dense"]),
        *_matrix(weights, [f"{layer}.intermediate.dense"], between),
        *_matrix(weights, [f"{layer}.output.dense"]),
        *_norm(weights, between),
        *_norm(weights, after),
    )


def _matrix(weights: Mapping[str, Floats], names: Sequence[str], norm: str = "") -> Buffers:
    """Weights of matrices whose outputs stand beside each other, in the kernel's order. norm: of their inputs."""
    matrix = np.concatenate([weights[f"{name}.weight"] for name in names])
    divisor: Floats = np.ones(matrix.shape[1], np.float32)
    if norm:
        largest = _OUTLYING * np.abs(weights[f"{norm}.weight"]) + np.abs(weights[f"{norm}.bias"])
        divisor = (largest / np.abs(matrix).max(0)) ** np.float32(_HALF)
        matrix = matrix * divisor
    scales = np.abs(matrix).max(1) / 127
    rounded = np.round(matrix / scales[:, None]).astype(np.int8)
    outputs, inputs = matrix.shape
    packed = rounded.reshape(outputs // _BLOCK, _BLOCK, inputs // 4, 4).transpose(0, 2, 1, 3)
    bias = np.concatenate([weights[f"{name}.bias"] for name in names])
    totals = rounded.sum(1, dtype=np.int32)
    return np.ascontiguousarray(packed), scales, totals, bias, np.float32(1) / divisor
