"""Quantised checkpoints: what their tensors mean, and their rows as float32.

Read are weights of 8 bits, floating or integers, with scales of the tensor, of channels, groups or blocks (`fp8`,
`fbgemm_fp8`, `compressed-tensors`), and of 4 bits in groups (`gptq`, `awq`, `compressed-tensors`). Activations are not
quantised, also where the checkpoint was made for it. Other formats, and quantised experts, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from paceline.engine.stored_weights import Rows
from paceline.errors import ConfigError

_KNOWN: Final = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq")
_HALVES: Final = 2  # numbers of 4 bits in a byte
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # columns in one integer of AWQ, the lowest bits first
_FP8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


class ScaledRows:
    """One byte a number, times a scale: floats of 8 bits, or integers from which a zero point is subtracted."""

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None, group: int | None = None) -> None:
        """codes: (out, in); scale, zero: (out or 1, groups or 1); group: numbers of a row with one scale."""
        self._codes, self._width = codes, codes.shape[1]
        self._scale, self._zero = scale.float(), None if zero is None else zero.float()
        self._group = group or self._width
        if self._scale.shape[1] != -(-self._width // self._group):
            raise ValueError(f"{self._scale.shape[1]} scales for {self._width} numbers in groups of {self._group}")

    @property
    def shape(self) -> tuple[int, int]:
        return self._codes.shape[0], self._width

    def floats(self, first: int, stop: int, buffer: Tensor) -> Tensor:
        self._copy(first, stop, buffer)
        whole = self._width // self._group * self._group  # the last group may be shorter
        parts = [(buffer[:, :whole].view(len(buffer), -1, self._group), slice(0, whole // self._group))]
        if whole < self._width:
            parts.append((buffer[:, whole:].unsqueeze(1), slice(-1, None)))
        for values, groups in parts:
            if self._zero is not None:
                values.sub_(_rows(self._zero, first, stop)[:, groups, None])
            values.mul_(_rows(self._scale, first, stop)[:, groups, None])
        return buffer

    def _copy(self, first: int, stop: int, buffer: Tensor) -> None:
        codes = self._codes[first:stop]
        if codes.dtype != torch.float8_e4m3fn:
            buffer.copy_(codes)
            return
        # torch converts these one by one. As float16, whose exponent has one bit more, they are 1/256 of themselves;
        # the code of no number becomes 480, which no checkpoint holds.
        wide = codes.view(torch.int8).to(torch.int16)
        buffer.copy_((((wide & 0x7F) << 7) | (wide & -32768)).view(torch.float16))
        buffer.mul_(256.0)


class NibbleRows(ScaledRows):
    """Two numbers of 4 bits a byte: the first half of a row in the low bits, the second in the high ones."""

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor, group: int | None = None) -> None:
        """codes: (out, in) uint8, below 16"""
        half = codes.shape[1] // _HALVES
        super().__init__(codes, scale, zero, group)
        self._codes = codes[:, :half] | (codes[:, half:] << 4)

    def _copy(self, first: int, stop: int, buffer: Tensor) -> None:
        codes, half = self._codes[first:stop], self._width // _HALVES
        buffer[:, :half].copy_(codes & 15)
        buffer[:, half:].copy_(codes >> 4)


def _rows(table: Tensor, first: int, stop: int) -> Tensor:
    return table[first:stop] if len(table) > 1 else table


class Quantized(nn.Module):
    """Stands for a linear while its tensors are read, under the names that they have in the file."""

    def __init__(self, tensors: Mapping[str, Tensor], has_bias: bool, sizes: tuple[int, int], settings: Any) -> None:
        """tensors: without contents; sizes: (out, in); settings: of `config.json`"""
        super().__init__()
        self.out_features, self.in_features = sizes
        self._settings = settings
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        if has_bias and "bias" not in tensors:
            self.register_buffer("bias", torch.empty(sizes[0], device="meta"))
        elif not has_bias:
            self.bias = None

    def rows(self) -> Rows:
        """Raises ConfigError for a layout that is not known here."""
        found = dict(self.named_buffers())
        try:
            if "qweight" in found:
                return self._awq(**found) if self._settings["quant_method"] == "awq" else self._gptq(**found)
            return self._packed(found) if "weight_packed" in found else self._bytes(found)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"quantised weights of {', '.join(sorted(found))} are not known here: {error}") from error

    def _bytes(self, found: Mapping[str, Tensor]) -> Rows:
        """A byte a number: `fp8` with scales of blocks, else with those of `compressed-tensors`."""
        codes, scale = found["weight"], found.get("weight_scale_inv", found.get("weight_scale"))
        if codes.dtype not in (*_FP8, torch.int8) or scale is None:
            raise ValueError(f"{codes.dtype} without a scale" if scale is None else f"weights of {codes.dtype}")
        scale = scale.float().reshape(scale.shape if scale.dim() == 2 else (-1, 1))
        zero = found.get("weight_zero_point")
        group = self.in_features // scale.shape[1]
        if "weight_scale_inv" in found and scale.numel() > 1:
            height, group = self._settings["weight_block_size"]
            scale = scale.repeat_interleave(height, 0)[: self.out_features]
        elif 1 < len(scale) < self.out_features:
            height = -(-self.out_features // len(scale))
            scale = scale.repeat_interleave(height, 0)[: self.out_features]
        return ScaledRows(codes, scale, None if zero is None else zero.reshape(scale.shape), group)

    def _gptq(self, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, **_: Tensor) -> Rows:
        bits = 32 * len(qweight) // self.in_features
        zeros = _unpacked(qzeros, bits)
        if self._settings.get("checkpoint_format", "gptq") != "gptq_v2":
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return _grouped(_unpacked(qweight.t(), bits), scales.t(), zeros.t(), bits, g_idx)

    def _awq(self, qweight: Tensor, qzeros: Tensor, scales: Tensor, **_: Tensor) -> Rows:
        bits = 32 * qweight.shape[1] // self.out_features
        if bits != 4:
            raise ValueError(f"AWQ with {bits} bits")
        codes, zeros = (_unpacked(each, bits, _AWQ_ORDER) for each in (qweight, qzeros))
        return _grouped(codes.t(), scales.t(), zeros.t(), bits, None)

    def _packed(self, found: Mapping[str, Tensor]) -> Rows:
        packed, scale = found["weight_packed"], found["weight_scale"]
        if packed.dtype != torch.int32:
            raise ValueError(f"packed weights of {packed.dtype}")
        bits = 32 * packed.shape[1] // self.in_features
        codes = _unpacked(packed, bits)[:, : self.in_features]
        zeros = torch.full(scale.shape, 1 << (bits - 1))
        if (stored := found.get("weight_zero_point")) is not None:
            zeros = _unpacked(stored.t(), bits).t()[: self.out_features]
        return _grouped(codes, scale, zeros, bits, found.get("weight_g_idx"))


def _unpacked(packed: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Numbers of `bits` bits in integers of 32 along the last axis, the lowest bits first unless `order` says which
    column each is of: (n, m) → (n, m * 32 / bits), uint8."""
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits a number")
    count = 32 // bits
    found = torch.empty(*packed.shape, count, dtype=torch.uint8)
    for place, column in enumerate(order or range(count)):
        found[..., column] = (packed >> (bits * place)) & ((1 << bits) - 1)
    return found.flatten(-2)


def _grouped(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group_of: Tensor | None) -> Rows:
    """codes: (out, in) uint8; scale, zero: (out, groups). group_of: the group of each column; None: in order"""
    width, groups = codes.shape[1], scale.shape[1]
    group, order = -(-width // groups), None
    if group_of is not None and not torch.equal(group_of.long(), torch.arange(width) // group):
        order = torch.argsort(group_of.long(), stable=True)
        if width % groups or not torch.equal(group_of.long()[order], torch.arange(width) // group):
            raise ValueError("groups of unequal sizes")
        codes = codes[:, order]
    kind = NibbleRows if bits == 4 and width % 2 == 0 else ScaledRows
    rows = kind(codes.contiguous(), scale.contiguous(), zero.contiguous(), group)
    return rows if order is None else _Reordered(rows, torch.argsort(order))


class _Reordered:
    """Rows whose columns are stored in another order, as where GPTQ has sorted them by their weight."""

    def __init__(self, rows: Rows, places: Tensor) -> None:
        """places: (in,) where each column is stored"""
        self._rows, self._places = rows, places

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape

    def floats(self, first: int, stop: int, buffer: Tensor) -> Tensor:
        return self._rows.floats(first, stop, buffer).index_select(1, self._places)


# How the tensors come into a model: transformers reads every tensor as it is in the file, into the modules that this
# quantiser has put in place of linears. Its own quantisers need further packages, some of them a GPU.

_METHOD: Final = "as-stored"
_MARKS: Final = frozenset({"qweight", "weight_packed", "weight_scale", "weight_scale_inv"})  # of a quantised linear
_UNUSED: Final = frozenset(
    {"input_scale", "input_zero_point", "weight_shape", "activation_scale", "input_global_scale"}
)


class _Config(QuantizationConfigMixin):
    def __init__(self, modules: Mapping[str, Mapping[str, Tensor]], settings: object, **_: object) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]  # transformers takes further names
        self.modules, self.settings = modules, settings


class _Reader(HfQuantizer):
    def get_new_dtype(self, converter: object, param: object, dtype: object) -> None:
        """Leaves every tensor in its format."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        assert isinstance(self.quantization_config, _Config)
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for name, tensors in self.quantization_config.modules.items():
            if (linear := linears.get(name)) is None:
                raise ConfigError(f"quantised weights of {name}, which is no plain linear layer, are not known here")
            sizes = linear.out_features, linear.in_features
            made = Quantized(tensors, linear.bias is not None, sizes, self.quantization_config.settings)
            model.set_submodule(name, made)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def read_as_stored(config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Have transformers read a model of this configuration without converting anything.

    tensors: of its files, by name; those of quantised linears are looked at.
    """
    if _METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(_METHOD)(_Config)
        register_quantizer(_METHOD)(_Reader)
    modules: dict[str, dict[str, Tensor]] = {}
    for name in tensors:
        prefix, _, kind = name.rpartition(".")
        if kind in _MARKS:
            modules[prefix] = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if prefix in modules and kind not in _UNUSED:
            modules[prefix][kind] = torch.empty_like(tensor, device="meta")
    settings = getattr(config, "quantization_config", None) or {}
    config.quantization_config = {"quant_method": _METHOD, "modules": modules, "settings": settings}


def quantization_of(config: PretrainedConfig, directory: Path) -> str | None:
    """The name of the format in which a checkpoint is quantised; None if it is not.

    Raises ConfigError for one that is not known here.
    """
    settings: Mapping[str, Any] | None = getattr(config, "quantization_config", None)
    if not settings:
        return None
    name = str(settings.get("quant_method") or "quantised")
    kinds = [str(settings.get("format", ""))] + [
        str(each.get("format") or "") for each in (settings.get("config_groups") or {}).values()
    ]
    is_known = name in _KNOWN and all(kind in _PACKINGS for kind in kinds if kind and name == "compressed-tensors")
    if name in ("gptq", "awq"):
        is_known = str(settings.get("checkpoint_format", settings.get("version", "gptq"))).lower() in _LAYOUTS
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        is_known, kinds = False, ["sparse"]
    if not is_known:
        raise ConfigError(
            f"{directory} is quantised as {' '.join([name, *sorted(set(filter(None, kinds)))])}, which is not known "
            f"here; known are {', '.join(_KNOWN)} with 8 or 4 bits. Choose another file of this model."
        )
    return name


_PACKINGS: Final = frozenset({"float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "dense"})
_LAYOUTS: Final = frozenset({"gptq", "gptq_v2", "gemm"})


def rows_of(module: nn.Module) -> Rows | None:
    """The weight of a module that stands for a quantised linear; None for another module."""
    return module.rows() if isinstance(module, Quantized) else None


def dequantize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Turn modules that stand for quantised linears into linears of this number format, and everything else too: what
    a device computes that has no way for rows of another format."""
    for name, module in list(model.named_modules()):
        if (rows := rows_of(module)) is not None:
            linear = nn.Linear(rows.shape[1], rows.shape[0], bias=module.bias is not None, device="meta")
            linear.weight = nn.Parameter(rows.floats(0, rows.shape[0], torch.empty(rows.shape)), requires_grad=False)
            if isinstance(module.bias, Tensor):
                linear.bias = nn.Parameter(module.bias, requires_grad=False)
            model.set_submodule(name, linear)
    for weight in model.parameters():
        weight.data = weight.detach().to(dtype)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their names. Their files are mapped, and nothing of them is read."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            found |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # no dictionary
    return found


def num_weights_of(model: PreTrainedModel) -> int:
    """Numbers that the model was made with, whatever they have been quantised to."""
    packed = [module for module in model.modules() if isinstance(module, Quantized)]
    weights = sum(each.out_features * each.in_features for each in packed)
    biases = sum(each.out_features for each in packed if each.bias is not None)
    return weights + biases + sum(weight.numel() for weight in model.parameters())
