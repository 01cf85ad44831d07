"""Formats of a model's weights: which one it is computed in and which they are kept in, linears and embeddings over
weights in the file's format, and quantised checkpoints.

A processor without arithmetic in bfloat16 computes in float32. Weights converted at once would take two to eight times
the file, read from memory for every token. Here those of 16 bits are converted in registers, by a kernel in C; others,
and all where it was not built, in tiles of rows, in a buffer that stays in the processor's cache, is multiplied there,
and is overwritten by the next tile. Weights of a mapped file stay in the mapping, and a tied embedding is the same
tensor as the head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from paceline.engine import layer_kernel
from paceline.engine.tensors import computes_bfloat16
from paceline.errors import ConfigError

_TILE: Final = 1 << 19  # numbers of a tile: 2 MiB as float32
STORED: Final = frozenset({torch.bfloat16, torch.float16})  # formats that are worth keeping


class Rows(ABC):
    """A matrix in the format of a file."""

    shape: tuple[int, int]  # (out, in)
    is_converted = True  # `tile` needs its buffer

    @abstractmethod
    def tile(self, first: int, stop: int, buffer: Tensor | None) -> Tensor:
        """Rows `first` to `stop` - 1 in float32, in `buffer`, or as they are where these can be multiplied.
        buffer: (rows, in); None where none is needed"""


class FloatRows(Rows):
    """Numbers of any floating format that torch converts."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()
        self.shape = weight.shape[0], weight.shape[1]
        self.is_converted = weight.dtype != torch.float32 and not layer_kernel.can_run(weight)

    def tile(self, first: int, stop: int, buffer: Tensor | None) -> Tensor:
        rows = self.weight[first:stop]
        return rows if buffer is None else buffer.copy_(rows)


class Scratch:
    """The buffer that the linears of one model share, since one of them runs at a time."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0, device="cpu")

    def rows(self, count: int, width: int) -> Tensor:
        """(count, width), with any contents"""
        if self._numbers.numel() < count * width:
            self._numbers = self._numbers.new_empty(count * width)
        return self._numbers[: count * width].view(count, width)


class StoredLinear(nn.Module):
    """y = x W' + b in float32, with W of several matrices below each other, each in its own format."""

    def __init__(self, parts: Sequence[Rows], bias: Tensor | None, scratch: Scratch) -> None:
        super().__init__()
        self.parts, self.scratch, self.bias = tuple(parts), scratch, bias
        self.out_features = sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]
        assert all(part.shape[1] == self.in_features for part in parts)
        whole = [part.weight for part in parts if isinstance(part, FloatRows) and layer_kernel.can_run(part.weight)]
        self.direct = layer_kernel.parts_of(whole) if len(whole) == len(parts) else None

    @property
    def weight(self) -> Tensor:
        """(out, in) in float32, for modules that multiply with it themselves, such as Mamba's."""
        first = self.parts[0]
        if len(self.parts) == 1 and isinstance(first, FloatRows) and first.weight.dtype == torch.float32:
            return first.weight
        return torch.cat([part.tile(0, part.shape[0], torch.empty(part.shape)).float() for part in self.parts])

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in), float32 → (..., out)"""
        flat = x.reshape(-1, self.in_features).contiguous()
        y = flat.new_empty(flat.shape[0], self.out_features)
        if self.direct is not None:
            layer_kernel.linear(flat, self.direct, self.bias, y)
            return y.view(*x.shape[:-1], self.out_features)
        begin = 0
        for part in self.parts:
            rows = part.shape[0]
            step = max(1, _TILE // self.in_features) if part.is_converted else rows
            for first in range(0, rows, step):
                stop = min(first + step, rows)
                buffer = self.scratch.rows(stop - first, self.in_features) if part.is_converted else None
                _multiply(flat, part.tile(first, stop, buffer), self.bias, y, begin + first)
            begin += rows
        return y.view(*x.shape[:-1], self.out_features)


def _multiply(x: Tensor, weights: Tensor, bias: Tensor | None, y: Tensor, first: int) -> None:
    """Write the columns of y from `first` on, as `layer_kernel.linear` does."""
    if layer_kernel.can_run(weights):
        layer_kernel.linear(x, layer_kernel.parts_of([weights]), bias, y, first)
        return
    own = slice(first, first + len(weights))
    torch.mm(x, weights.t(), out=y[:, own])
    if bias is not None:
        y[:, own] += bias[own]


def joined(parts: Sequence[StoredLinear]) -> StoredLinear:
    """One linear that computes those of all parts, their outputs concatenated."""
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([torch.zeros(part.out_features) if part.bias is None else part.bias for part in parts])
    return StoredLinear([rows for part in parts for rows in part.parts], bias, parts[0].scratch)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear over these very tensors. weight: (out, in)"""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class StoredEmbedding(nn.Module):
    """An embedding of the model's own kind, such as one that scales, over a table of the rows that a step needs."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.table = embedding.weight.detach()
        embedding.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        embedding.padding_idx = None  # of gradients alone, and beyond the rows of a step
        self._embedding = embedding

    @property
    def weight(self) -> Tensor:
        """The table: some models look where it is."""
        return self.table

    def forward(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids.reshape(-1), self.table).float()
        places = torch.arange(len(rows)).view(ids.shape)
        found: Tensor = functional_call(self._embedding, {"weight": rows}, (places,))
        return found


class Experts(nn.Module):
    """Experts of a layer: each computes the rows that are routed to it, and a row adds up its experts in their order,
    whichever other rows there are."""

    def __init__(self, gate_ups: Sequence[nn.Module], downs: Sequence[nn.Module], act: nn.Module) -> None:
        super().__init__()
        self._gate_ups, self._downs = nn.ModuleList(gate_ups), nn.ModuleList(downs)
        self._act = act

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: (rows, hidden); top_k_index, top_k_weights: (rows, experts of a row) → (rows, hidden)"""
        mixed = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():  # sorted
            rows, places = torch.where(top_k_index == expert)
            gate, up = self._gate_ups[expert](hidden_states[rows]).chunk(2, dim=-1)
            found = self._downs[expert](self._act(gate) * up)
            mixed.index_add_(0, rows, (found * top_k_weights[rows, places, None]).to(mixed.dtype))
        return mixed


def experts_of(module: nn.Module, linear: Callable[[Tensor], nn.Module]) -> Experts | None:
    """The experts that a module of transformers keeps in two tensors; None for another module and other gates.

    linear: computes with a weight of (out, in).
    """
    parts = dict(module.named_parameters(recurse=False))
    is_gated = parts.keys() == {"gate_up_proj", "down_proj"} and all(part.dim() == 3 for part in parts.values())
    if not is_gated or not getattr(module, "is_concatenated", False) or getattr(module, "is_transposed", True):
        return None
    acts = [*module.children()]
    if len(acts) != 1 or type(module)._apply_gate.__module__ != "transformers.integrations.moe":  # type: ignore[attr-defined]  # untyped
        return None
    gate_ups, downs = ([linear(weight) for weight in parts[name].detach()] for name in ("gate_up_proj", "down_proj"))
    return Experts(gate_ups, downs, acts[0])


def _keep_stored(model: PreTrainedModel) -> None:
    """Replace the linears, experts and input embedding of a model on the CPU in place, and convert what else it has to
    float32: norms, biases, routers."""
    scratch = Scratch()

    def linear(weight: Tensor) -> StoredLinear:
        return StoredLinear([FloatRows(weight.detach())], None, scratch)

    for name, module in list(model.named_modules()):
        made: nn.Module | None = experts_of(module, linear)
        if (rows := rows_of(module)) is None:
            if type(module) is nn.Linear:
                rows = FloatRows(module.weight.detach())
            elif isinstance(module, Conv1D):
                rows = FloatRows(module.weight.detach().t())
        if rows is not None:
            bias = module.bias.detach().float() if isinstance(module.bias, Tensor) else None
            made = StoredLinear([rows], bias, scratch)
        if made is not None:
            model.set_submodule(name, made)
    table = model.get_input_embeddings()
    if isinstance(table, nn.Embedding) and table.weight.dtype in STORED:
        model.set_input_embeddings(StoredEmbedding(table))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            tensor.data = tensor.detach().float()


# ---- quantised checkpoints: what their tensors mean, and their rows as float32 --------------------------------------
# Read are weights of 8 bits, floating or integers, with scales of the tensor, of channels, groups or blocks (`fp8`,
# `fbgemm_fp8`, `compressed-tensors`), and of 4 bits in groups (`gptq`, `awq`, `compressed-tensors`). Activations are
# not quantised, also where the checkpoint was made for it. Other formats, and quantised experts, are refused by name.
_KNOWN: Final = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq")
_HALVES: Final = 2  # numbers of 4 bits in a byte
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # columns in one integer of AWQ, the lowest bits first
_FP8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


class ScaledRows(Rows):
    """One byte a number, times a scale: floats of 8 bits, or integers from which a zero point is subtracted."""

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None, group: int | None = None) -> None:
        """codes: (out, in); scale, zero: (out or 1, groups or 1); group: numbers of a row with one scale."""
        self._codes, self._width = codes, codes.shape[1]
        self.shape = codes.shape[0], codes.shape[1]
        self._scale, self._zero = scale.float(), None if zero is None else zero.float()
        self._group = group or self._width
        if self._scale.shape[1] != -(-self._width // self._group):
            raise ValueError(f"{self._scale.shape[1]} scales for {self._width} numbers in groups of {self._group}")

    def tile(self, first: int, stop: int, buffer: Tensor | None) -> Tensor:
        assert buffer is not None
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


class _Reordered(Rows):
    """Rows whose columns are stored in another order, as where GPTQ has sorted them by their weight."""

    def __init__(self, rows: Rows, places: Tensor) -> None:
        """places: (in,) where each column is stored"""
        self._rows, self._places, self.shape = rows, places, rows.shape

    def tile(self, first: int, stop: int, buffer: Tensor | None) -> Tensor:
        return self._rows.tile(first, stop, buffer).index_select(1, self._places)


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


def _quantization_of(config: PretrainedConfig, directory: Path) -> str | None:
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
            weight = rows.tile(0, rows.shape[0], torch.empty(rows.shape))
            model.set_submodule(name, plain_linear(weight, module.bias if isinstance(module.bias, Tensor) else None))
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


# ---- the format of a model, and why ---------------------------------------------------------------------------------
DType = Literal["auto", "float32", "bfloat16", "float16"]
_SMALL_MODEL: Final = 100_000_000  # parameters


@dataclass(frozen=True, slots=True)
class NumberFormat:
    computed: torch.dtype
    is_stored: bool  # every tensor is read in the file's format, not in `computed`
    by_rows: bool  # weights stay so, and rows of them are converted when they are used
    text: str  # for the log

    def adopt(self, model: PreTrainedModel) -> None:
        """Make a model on the CPU, just read, compute in this format."""
        if self.by_rows:
            _keep_stored(model)
        elif self.is_stored:
            dequantize(model, self.computed)


def choose_format(requested: DType, device: torch.device, config: PretrainedConfig, directory: Path) -> NumberFormat:
    """requested, auto: see `loader.load_model`. Raises ConfigError for a quantisation that is not known here."""
    quantization = _quantization_of(config, directory)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else None
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    on_cpu = device.type == "cpu"
    if requested != "auto":
        computed, why = getattr(torch, requested), "as asked"
    else:
        computed, why = served_dtype(device, None if quantization else stored, size)
    if quantization and on_cpu:
        computed, why = torch.float32, "in which processors compute quantised weights"
    is_half = stored in STORED and not _is_small(stored, size)
    is_kept = computed == torch.float32 and (is_half or layer_kernel.kernel() is not None)
    by_rows = on_cpu and (quantization is not None or is_kept)
    file = quantization or _name(stored or torch.float32)
    if by_rows:
        kept = f"weights stay in {file} as in the file"
        kept += "" if file == _name(computed) else ", and rows are converted when they are used"
    else:
        kept = f"weights of the file, in {file}, are kept in {_name(computed)}"
    return NumberFormat(computed, bool(quantization) or by_rows, by_rows, f"{_name(computed)}, {why}; {kept}")


def format_of(requested: DType, device: torch.device, directory: Path) -> NumberFormat:
    """The same of a model that is not loaded yet."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return choose_format(requested, device, config, directory)


def served_dtype(device: torch.device, stored: torch.dtype | None, size: int) -> tuple[torch.dtype, str]:
    """The number format in which a model is computed whose weights are `size` bytes in the format `stored`, and why."""
    if device.type == "cuda":
        return torch.bfloat16, "as on every GPU"
    if stored not in STORED:
        return torch.float32, "as on every processor"
    if _is_small(stored, size):
        return torch.float32, "since a small model is as fast in it"
    if stored == torch.float16:
        return torch.float32, "since processors do not compute in float16"
    if computes_bfloat16():
        return torch.bfloat16, "as in the file"
    return torch.float32, "since this processor does not compute in bfloat16"


def _is_small(stored: torch.dtype | None, size: int) -> bool:
    return size < _SMALL_MODEL * (2 if stored in STORED else 4)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
