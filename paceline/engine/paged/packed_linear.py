"""Linear layers packed for oneDNN, and fused decoder layers and MLPs: less memory traffic, fewer kernels.

`pack` replaces modules of a transformers model in place. It recognises modules by the names of their parts; the caller
verifies the scores afterwards. Linears are packed on CPUs, in float32 and bfloat16; elsewhere they stay plain, also
inside fused modules. Of a layer that is not recognised only the linears are packed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.pytorch_utils import Conv1D

from paceline.engine import layer_kernel
from paceline.engine.paged.attention.backends import CpuKernels
from paceline.engine.paged.attention.tile_plan import Attending, LayerAttention, TiledAttention
from paceline.engine.tensors import computes_bfloat16
from paceline.engine.weights import StoredLinear, experts_of, joined, plain_linear
from paceline.system import trim_heap

_ROWS = 16  # the batch that oneDNN packs for; the packed weights serve any
_EXACT_ROWS = 16  # up to here every row count is computed as it is: steps of answers, where a padded row costs most
_LINEAR = nn.Linear | StoredLinear
_LLAMA_LIKE = frozenset({"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer"})


def padded_rows(rows: int) -> int:
    """The row count to compute for `rows`, at most an eighth more: eight counts between two powers of two.

    oneDNN generates code for every row count and weight shape that it meets, and keeps it: half a megabyte and about a
    millisecond each, so prompts of all lengths would take a gigabyte.
    """
    if rows <= _EXACT_ROWS:
        return rows
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step


class PackedLinear(nn.Module):
    """y = x W' + b with W in oneDNN's own layout. The weight cannot be read back."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., rows, in) → (..., rows, out)"""
        rows = x.shape[-2]
        more = padded_rows(rows) - rows
        if more:
            x = functional.pad(x, (0, 0, 0, more))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y[..., :rows, :] if more else y


def can_pack(weight: Tensor) -> bool:
    """True if this machine has a packed kernel for this weight."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return computes_bfloat16()
    return weight.dtype == torch.float32


def _linear(parts: Sequence[nn.Module]) -> nn.Module:
    """One linear that computes those of all parts, their outputs concatenated."""
    if stored := [part for part in parts if isinstance(part, StoredLinear)]:
        if len(stored) < len(parts):
            raise ValueError("some of the fused linears are stored and some are not")
        return joined(stored)
    weight = torch.cat([_weight(part) for part in parts]) if len(parts) > 1 else _weight(parts[0])
    biases = [part.bias.detach() for part in parts if isinstance(part.bias, Tensor)]
    if biases and len(biases) < len(parts):
        raise ValueError("some of the fused linears have a bias and some have none")
    return _of_weight(weight, torch.cat(biases) if biases else None)


def _of_weight(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    return PackedLinear(weight, bias) if can_pack(weight) else plain_linear(weight, bias)


def _weight(module: nn.Module) -> Tensor:
    """(out, in)"""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().t() if isinstance(module, Conv1D) else weight.detach()


class FusedMLP(nn.Module):
    """(act(x Wg) * x Wu) Wd, the first two products as one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        act = dict(mlp.named_children())["act_fn"]
        self.gate_up = _linear([mlp.get_submodule("gate_proj"), mlp.get_submodule("up_proj")])
        self.down = _linear([mlp.get_submodule("down_proj")])
        self._act, self.is_silu = act, isinstance(act, nn.SiLU | SiLUActivation)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        if self.is_silu and layer_kernel.can_run(both):
            passed = layer_kernel.gate(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            passed = self._act(gate) * up
        y: Tensor = self.down(passed)
        return y


class FusedLayer(nn.Module):
    """Llama-like decoder layer: rotary attention and a gated MLP, each pre-normed and with a residual."""

    def __init__(self, layer: nn.Module, index: int, params: LayerAttention) -> None:
        """params: as recorded from the layer's own attention in the trial forward"""
        super().__init__()
        attention = layer.get_submodule("self_attn")
        heads = [attention.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")]
        self._index, self._params = index, params
        self._qkv = _linear(heads)
        self._out = _linear([attention.get_submodule("o_proj")])
        dim = int(attention.head_dim)  # type: ignore[arg-type]  # nn.Module types any attribute as Tensor or Module
        self._dim = dim
        self._sizes = [int(part.out_features) // dim for part in heads]  # type: ignore[arg-type]  # heads of q, k and v
        self._mlp = FusedMLP(layer.get_submodule("mlp"))
        self._before = _Norm(layer.get_submodule("input_layernorm"))
        self._between = _Norm(layer.get_submodule("post_attention_layernorm"))
        parts = dict(attention.named_children())
        self._norms = [_Norm(parts[name]) for name in ("q_norm", "k_norm") if name in parts]  # Qwen3

    @property
    def query_heads(self) -> int:
        return self._sizes[0]

    def record(self) -> tuple[object, ...] | None:
        """The layer as `layer_kernel.LAYER` has it; None where the kernel in C does not compute all of it."""
        linears = [self._qkv, self._out, self._mlp.gate_up, self._mlp.down]
        found = [_record(each) for each in linears if isinstance(each, StoredLinear) and each.direct is not None]
        norms = [self._before, self._between, *self._norms]
        if len(found) < len(linears) or not self._mlp.is_silu or self._dim > layer_kernel.MOST_DIMS:
            return None
        if len({each.eps for each in norms}) > 1 or any(each.weight.dtype != torch.float32 for each in norms):
            return None
        params, weights = self._params, [each.weight.data_ptr() for each in norms]
        weights += [0] * (4 - len(weights))  # heads are not normed
        numbers = self._mlp.down.in_features, self._index, params.window or 0
        return (*weights, *found, *numbers, self._before.eps, *layer_kernel.scales(params.scale, params.softcap))

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attn_metadata: Attending,
        **_: object,
    ) -> Tensor:
        hidden = hidden_states[0]  # (rows, hidden)
        if attn_metadata.rotary is None:
            attn_metadata.rotary = _signed(*position_embeddings)
        cos, sin = attn_metadata.rotary
        query_heads, key_heads, _value_heads = self._sizes
        projected = self._qkv(self._before(hidden)).view(len(hidden), -1, self._dim)
        rotated, value = projected[:, : query_heads + key_heads], projected[:, query_heads + key_heads :]
        if self._norms:
            query, key = rotated.split_with_sizes((query_heads, key_heads), dim=1)
            rotated = torch.cat((self._norms[0](query), self._norms[1](key)), dim=1)
        if layer_kernel.can_run(rotated):
            layer_kernel.turn(rotated, cos, sin)
        else:
            rotated = torch.addcmul(rotated * cos, rotated.roll(self._dim // 2, -1), sin)
        query, key = rotated.split_with_sizes((query_heads, key_heads), dim=1)
        mixed = attn_metadata.attend(self._index, query, key, value, self._params)
        hidden = hidden + self._out(mixed.reshape(len(hidden), -1))
        added: Tensor = hidden + self._mlp(self._between(hidden))
        return added[None]


def _record(linear: StoredLinear) -> tuple[int, int, int]:
    assert linear.direct is not None
    return linear.direct.ctypes.data, len(linear.direct), 0 if linear.bias is None else linear.bias.data_ptr()


class FusedStack(nn.Module):
    """Fused layers one after the other: one call of the kernel in C, where it attends."""

    def __init__(self, layers: Sequence[FusedLayer], records: Sequence[tuple[object, ...]]) -> None:
        """records: `FusedLayer.record` of each"""
        super().__init__()
        self._layers = nn.ModuleList(layers)
        self._table = np.array(records, layer_kernel.LAYER)
        self._heads = layers[0].query_heads
        self._most_threads = torch.get_num_threads()

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attn_metadata: Attending,
        **_: object,
    ) -> Tensor:
        if not isinstance(attn_metadata, TiledAttention) or not isinstance(attn_metadata.kernels, CpuKernels):
            given = {"position_embeddings": position_embeddings, "attn_metadata": attn_metadata}
            for layer in self._layers:
                hidden_states = layer(hidden_states, **given)
            return hidden_states
        hidden, step, storage = hidden_states[0].clone(), attn_metadata.step, attn_metadata.storage
        layer_kernel.use_free_cores(self._most_threads)
        layer_kernel.layers(
            self._table,
            hidden,
            _signed(*position_embeddings),
            storage.keys,
            storage.values,
            step.slots,
            torch.cat(step.items),
            step.pool,
            step.positions,
            heads=self._heads,
            block_size=storage.block_size,
        )
        return hidden[None]


class _Norm(nn.Module):
    """Root mean square norm as one kernel call."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, Tensor)
        self.weight = weight.detach()
        self.eps = float(norm.variance_epsilon)  # type: ignore[arg-type]  # as `head_dim` above

    def forward(self, x: Tensor) -> Tensor:
        if layer_kernel.can_run(x):
            return layer_kernel.norm(x, self.weight, self.eps)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(1, rows, dim) each to (rows, 1, dim), the first half of sin negated so that rotate_half is a plain roll."""
    left, right = sin[0].chunk(2, dim=-1)
    return cos[0].unsqueeze(1), torch.cat((-left, right), dim=-1).unsqueeze(1)


def pack(model: nn.Module, params: Sequence[LayerAttention]) -> None:
    """Replace recognised layers, MLPs and linears in place. params: of each layer's attention.

    The weights of a replaced module are freed with its last reference.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ in _LLAMA_LIKE:
            index = module.get_submodule("self_attn").layer_idx
            assert isinstance(index, int)
            model.set_submodule(name, FusedLayer(module, index, params[index]))
    for stack in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        layers = [each for each in stack if isinstance(each, FusedLayer)]
        records = [record for each in layers if (record := each.record()) is not None]
        if records and len(records) == len(stack):
            del stack[:]
            stack.append(FusedStack(layers, records))
    for name, module in list(model.named_modules()):
        children = dict(module.named_children())
        is_gated = {"gate_proj", "up_proj", "down_proj", "act_fn"} == children.keys() and len(children) == 4
        if is_gated and all(isinstance(children[part], _LINEAR) for part in ("gate_proj", "up_proj", "down_proj")):
            model.set_submodule(name, FusedMLP(module))
    for name, module in list(model.named_modules()):
        if (experts := experts_of(module, _of_weight)) is not None:
            model.set_submodule(name, experts)
        elif isinstance(module, nn.Linear | Conv1D) and can_pack(_weight(module)):
            model.set_submodule(name, _linear([module]))


# Weights that are kept once: what has been packed leaves the memory that the weight files are mapped into.
#
# Tensors of a safetensors file share one mapping, which stays as long as one of them is used. Packing has read all of
# it, so the whole file would stay resident beside the packed copies. Afterwards only the input embedding is used from
# it: the other tensors are copied out, and the mapping's pages are given back. Rows of the embedding come in again
# from the system's page cache as tokens need them, each with its neighbours, so that a few thousand would bring all of
# it: they are given back again and again. Linux only; elsewhere, and for weights that were converted while they were
# read, nothing is done.


log = logging.getLogger("paceline.engine")

_MAPS = Path("/proc/self/smaps")
_KEPT_ROWS = 64  # of an embedding that are read before its pages are given back: some 4 to 16 MiB


def release_mapped_weights(model: nn.Module) -> None:
    """Copy small tensors out of mapped files, and give the pages of the files back."""
    ranges = _mapped_files()
    if not ranges or any(isinstance(module, StoredLinear) for module in model.modules()):
        return  # weights of stored linears are used where they are
    embeddings = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if _range_of(tensor, ranges) is not None and tensor.data_ptr() not in embeddings:
                tensor.data = tensor.detach().clone()
        for name, value in list(vars(module).items()):  # tensors that fused modules have taken over
            if isinstance(value, torch.Tensor) and _range_of(value, ranges) is not None:
                setattr(module, name, value.clone())
    for first, stop in ranges:
        _give_back(first, stop)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (found := _range_of(module.weight, ranges)) is not None:
            module.register_forward_hook(_PagesOfEmbedding(*found))
    trim_heap()


class _PagesOfEmbedding:
    """A hook of an embedding in a mapped file: gives the pages back that its rows have brought in."""

    def __init__(self, first: int, stop: int) -> None:
        self._range, self._rows = (first, stop), 0

    def __call__(self, _module: nn.Module, _args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._rows += output.shape[:-1].numel()
        if self._rows >= _KEPT_ROWS:
            self._rows = 0
            _give_back(*self._range)


def _mapped_files() -> list[tuple[int, int]]:
    """Address ranges of safetensors files mapped into this process, of whose pages none has been written.

    A written page is this process's own, and would be lost: giving it back brings the file's contents again.
    """
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    ranges: list[tuple[int, int]] = []
    found: tuple[int, int] | None = None
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "Anonymous:" and found is not None:
            if rest.split()[0] == "0":
                ranges.append(found)
            found = None
        elif not name.endswith(":"):  # the next mapping
            first, _, stop = name.partition("-")
            found = (int(first, 16), int(stop, 16)) if line.endswith(".safetensors") else None
    return ranges


def _range_of(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> tuple[int, int] | None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:  # packed weights have no address
        return None
    address = tensor.data_ptr()
    return next((each for each in ranges if each[0] <= address < each[1]), None)


def _give_back(first: int, stop: int) -> None:
    """Drop the pages of a mapped file from this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), mmap.MADV_DONTNEED):
        log.debug("memory of weights could not be given back: error %d", ctypes.get_errno())
