"""Tensor conversions: logits to `Dist`, KV tensors to `KvPrefix` and back; the device of a thread.

The only module that makes distributions from tensors, and the only one that knows how bfloat16 is represented.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.sampling.dist import Dist
from paceline.errors import EngineError, EngineLost

_BITS = {torch.bfloat16: torch.uint16}  # formats that numpy lacks are represented by their bits


def computes_bfloat16() -> bool:
    """True if this processor has kernels for linear layers in bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def use_device(device: torch.device) -> None:
    """Make this GPU the thread's own: streams, kernels and pinned memory are made on the current one."""
    if device.type == "cuda" and device.index is not None and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def dists(logits: Tensor) -> tuple[Dist, ...]:
    """Dense distributions at temperature 1, by torch's softmax. logits: (rows, vocab), any float dtype."""
    scores = logits.float()
    norms = torch.logsumexp(scores, dim=-1).tolist()
    probs = torch.softmax(scores, dim=-1).double().cpu().numpy()
    return tuple(Dist.dense(row, norm) for row, norm in zip(probs, norms, strict=True))


def kv_from_tensors(model: str, tokens: Sequence[int], keys: Tensor, values: Tensor) -> KvPrefix:
    """keys: (layers, rows, kv heads, key dim), values likewise; on any device. Must not be changed afterwards."""
    name = str(keys.dtype).removeprefix("torch.")
    arrays = [tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).cpu().numpy() for tensor in (keys, values)]
    return KvPrefix(model, name, tuple(tokens), arrays[0], arrays[1])


def kv_to_tensors(
    rows: KvPrefix, model: str, keys: Sequence[int], values: Sequence[int], *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """CPU tensors that share the memory of `rows`: read-only.

    keys, values: the required shapes. Raises EngineError for other shapes, another dtype or another model.
    """
    name = str(dtype).removeprefix("torch.")
    found, required = (rows.keys.shape, rows.values.shape), (tuple(keys), tuple(values))
    if rows.model != model or rows.dtype != name or found != required:
        raise EngineError(f"these rows are of another model, or {rows.dtype} {found} where {name} {required} is needed")
    first, second = (torch.from_numpy(array).view(dtype) for array in (rows.keys, rows.values))
    return first, second


def engine_error(error: RuntimeError, device: torch.device) -> EngineError:
    """A forward has failed: it ran out of memory, or the device is lost.

    CUDA reports a fault late and then on every call, so the device itself is asked.
    """
    if device.type == "cuda":
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        else:
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as fault:
                return EngineLost(f"the GPU has failed: {fault}")
    return EngineError(f"the model could not run: {error}")
