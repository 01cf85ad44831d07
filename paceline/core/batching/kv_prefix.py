"""Keys and values of a sequence's first rows, outside any engine: exported by one, stored in a file, imported by
another.

Plain arrays, so that neither a store nor a test needs torch. Valid only for engines of the same model. Knows nothing of
files, blocks or attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

KvArray: TypeAlias = NDArray[np.generic]  # of a dtype in `CARRIERS`

# The model's dtype → that of the arrays. numpy has no bfloat16: its 16 bits are stored as an integer.
CARRIERS: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
}


@dataclass(frozen=True, slots=True, eq=False)
class KvPrefix:
    """Rows 0 to n - 1 of a sequence, as after a prefill of `tokens`. Raises ValueError if shapes or dtypes disagree."""

    model: str  # fingerprint; each range of a model's layers has its own
    dtype: str  # the model's
    tokens: tuple[int, ...]  # (n,), n >= 1
    keys: KvArray  # (layers, n, kv heads, key dim)
    values: KvArray  # (layers, n, kv heads, value dim)

    def __post_init__(self) -> None:
        carrier = CARRIERS.get(self.dtype)
        for array in (self.keys, self.values):
            if array.dtype != carrier or array.ndim != 4 or array.shape[1] != len(self.tokens):
                raise ValueError(f"{array.dtype} {array.shape} for {len(self.tokens)} rows of {self.dtype}")
        if not self.tokens or self.keys.shape[0] != self.values.shape[0]:
            raise ValueError(f"{len(self.tokens)} rows, {self.keys.shape[0]} and {self.values.shape[0]} layers")

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)
