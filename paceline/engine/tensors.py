"""Tensors to the pure forms and back: logits to `Dist`, KV to `KvRows`.

The only place where tensors become distributions, and the only one that knows how a bfloat16 is carried.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.sampling.dist import Dist
from paceline.errors import EngineError

_BITS = {torch.bfloat16: torch.uint16}  # number formats that numpy lacks are carried as their bits


def dists(logits: Tensor) -> tuple[Dist, ...]:
    """logits: (rows, vocab), any float dtype. Dense distributions at temperature 1; the softmax is torch's."""
    scores = logits.float()
    norms = torch.logsumexp(scores, dim=-1).tolist()
    probs = torch.softmax(scores, dim=-1).double().cpu().numpy()
    return tuple(Dist.dense(row, norm) for row, norm in zip(probs, norms, strict=True))


def kv_from_tensors(model: str, tokens: Sequence[int], keys: Tensor, values: Tensor) -> KvPrefix:
    """keys: (layers, rows, kv heads, key dim), values likewise; on any device, and not changed afterwards."""
    name = str(keys.dtype).removeprefix("torch.")
    arrays = [tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).cpu().numpy() for tensor in (keys, values)]
    return KvPrefix(model, name, tuple(tokens), arrays[0], arrays[1])


def kv_to_tensors(
    rows: KvPrefix, model: str, keys: Sequence[int], values: Sequence[int], *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tensors on the CPU over the memory of `rows`: for reading only.

    keys, values: the shapes that fit. Raises EngineError for other shapes, another dtype or another model.
    """
    name = str(dtype).removeprefix("torch.")
    found, wanted = (rows.keys.shape, rows.values.shape), (tuple(keys), tuple(values))
    if rows.model != model or rows.dtype != name or found != wanted:
        raise EngineError(f"these rows are of another model, or {rows.dtype} {found} where {name} {wanted} is needed")
    first, second = (torch.from_numpy(array).view(dtype) for array in (rows.keys, rows.values))
    return first, second
