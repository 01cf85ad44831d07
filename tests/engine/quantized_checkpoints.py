"""Checkpoints in the layouts of quantised formats, as their tools publish them, with what they are in float32.

Codes are drawn first and a float model is made of them, so a reader is right if it finds that model again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16  # numbers of a row with one scale
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, in the order of the bits of one integer

Made = tuple[Tensor, Mapping[str, Tensor]]  # weight, (out, in); tensors of the file by the ends of their names


def _packed(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers below 16 of the last axis in one integer."""
    found = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        found |= codes[..., column::8].long() << (4 * place)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def _grouped(weight: Tensor, group_of: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weight as it is read again, codes, scales, zero points) of 4 bits. Scales and zero points: (out, groups)"""
    if group_of is None:
        group_of = torch.arange(weight.shape[1]) // GROUP
    groups = [weight[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    scale = torch.stack([(part.amax(1) - part.amin(1)) / 15 for part in groups], 1).half()
    zero = torch.stack([-part.amin(1) for part in groups], 1).div(scale.float()).round().clamp(1, 15)
    codes = (weight / scale.float()[:, group_of] + zero[:, group_of]).round().clamp(0, 15)
    return (codes - zero[:, group_of]) * scale.float()[:, group_of], codes, scale, zero


def gptq(weight: Tensor) -> Made:
    read, codes, scale, zero = _grouped(weight)
    order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return read, _gptq_tensors(codes, scale, zero, order)


def gptq_sorted(weight: Tensor) -> Made:
    """Columns in groups by their weight, as with `desc_act`."""
    width = weight.shape[1]
    order = (torch.randperm(width, generator=torch.Generator().manual_seed(width)) // GROUP).int()
    read, codes, scale, zero = _grouped(weight, order.long())
    return read, _gptq_tensors(codes, scale, zero, order)


def _gptq_tensors(codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor) -> Mapping[str, Tensor]:
    zeros = _packed((zero - 1).t())  # the first version of the layout stores one less
    return {"qweight": _packed(codes).t(), "qzeros": zeros, "scales": scale.t(), "g_idx": order}


def awq(weight: Tensor) -> Made:
    read, codes, scale, zero = _grouped(weight)
    packed = {"qweight": _packed(codes.t(), _AWQ_COLUMNS), "qzeros": _packed(zero.t(), _AWQ_COLUMNS)}
    return read, packed | {"scales": scale.t()}


def packed_group(weight: Tensor) -> Made:
    """`pack-quantized` of compressed-tensors, symmetric."""
    parts = weight.unflatten(1, (-1, GROUP))
    scale = parts.abs().amax(2).div(7).bfloat16()
    codes = (parts / scale.float()[..., None]).round().clamp(-8, 7)
    read = (codes * scale.float()[..., None]).flatten(1)
    sizes = torch.tensor(weight.shape)
    return read, {"weight_packed": _packed(codes.flatten(1) + 8), "weight_scale": scale, "weight_shape": sizes}


def fp8_channel(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes.float() * scale, {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}


def fp8_tensor(weight: Tensor) -> Made:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes.float() * scale, {"weight": codes, "weight_scale": scale}


def fp8_block(weight: Tensor) -> Made:
    """Scales of blocks of 16 by 16, of which the last ones may be smaller."""
    out, width = weight.shape
    scale = torch.rand(-(-out // 16), -(-width // 16), generator=torch.Generator().manual_seed(out)) + 0.5
    wide = scale.repeat_interleave(16, 0)[:out].repeat_interleave(16, 1)[:, :width]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes.float() * wide, {"weight": codes, "weight_scale_inv": scale}


def int8_channel(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return codes.float() * scale, {"weight": codes, "weight_scale": scale}


_COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
FORMATS: dict[str, tuple[Callable[[Tensor], Made], Mapping[str, object]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq sorted": (gptq_sorted, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "packed": (packed_group, _COMPRESSED | {"format": "pack-quantized"}),
    "fp8 of channels": (fp8_channel, _COMPRESSED),
    "fp8 of tensors": (fp8_tensor, _COMPRESSED),
    "fp8 of blocks": (fp8_block, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "int8": (int8_channel, _COMPRESSED | {"format": "int-quantized"}),
}


def quantize(source: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """Two copies of a checkpoint of `folder`: with the linears of its layers in a format, and what they are read as."""
    make, settings = FORMATS[name]
    packed, plain = (shutil.copytree(source, folder / kind) for kind in ("packed", "plain"))
    tensors = load_file(source / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    for key, weight in list(tensors.items()):
        if ".layers." not in key or weight.dim() != 2:
            quantized[key] = weight
            continue
        tensors[key], parts = make(weight)
        quantized |= {f"{key.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantized, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return packed, plain
