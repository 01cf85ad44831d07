"""Linears and embeddings whose weights stay in the file's number format and are read as float32 a few rows at a time.

A processor without arithmetic in bfloat16 computes in float32. Weights converted at once would take two to eight times
the file, read from memory for every token; here a tile of rows is converted into a buffer that stays in the
processor's cache, multiplied there, and overwritten by the next tile. Weights of a mapped file stay in the mapping,
and a tied embedding is the same tensor as the head. Formats of quantised files: `quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_TILE: Final = 1 << 19  # numbers of a tile: 2 MiB as float32
STORED: Final = frozenset({torch.bfloat16, torch.float16})  # formats that are worth keeping


class Rows(Protocol):
    """A matrix in the format of a file."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""

    def floats(self, first: int, stop: int, buffer: Tensor) -> Tensor:
        """Rows `first` to `stop` - 1 in float32, in `buffer` unless they are float32 already. buffer: (rows, in)"""


class FloatRows:
    """Numbers of any floating format that torch converts."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        out, width = self._weight.shape
        return out, width

    def floats(self, first: int, stop: int, buffer: Tensor) -> Tensor:
        rows = self._weight[first:stop]
        return rows if rows.dtype == torch.float32 else buffer.copy_(rows)


class Scratch:
    """The buffer that the linears of one model share, since one of them runs at a time."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def rows(self, count: int, width: int) -> Tensor:
        """(count, width), with any contents"""
        if self._numbers.numel() < count * width:
            self._numbers = torch.empty(count * width)
        return self._numbers[: count * width].view(count, width)


class StoredLinear(nn.Module):
    """y = x W' + b in float32, with W of several matrices below each other, each in its own format."""

    def __init__(self, parts: Sequence[Rows], bias: Tensor | None, scratch: Scratch) -> None:
        super().__init__()
        self.parts, self.scratch = tuple(parts), scratch
        self.bias = bias
        self.out_features = sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in), float32 → (..., out)"""
        flat = x.reshape(-1, self.in_features)
        y = flat.new_empty(len(flat), self.out_features)
        step, begin = max(1, _TILE // self.in_features), 0
        for part in self.parts:
            rows = part.shape[0]
            for first in range(0, rows, step):
                stop = min(first + step, rows)
                tile = part.floats(first, stop, self.scratch.rows(stop - first, self.in_features))
                torch.mm(flat, tile.t(), out=y[:, begin + first : begin + stop])
            begin += rows
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


def joined(parts: Sequence[StoredLinear]) -> StoredLinear:
    """One linear that computes those of all parts, their outputs concatenated."""
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([torch.zeros(part.out_features) if part.bias is None else part.bias for part in parts])
    return StoredLinear([rows for part in parts for rows in part.parts], bias, parts[0].scratch)


class StoredEmbedding(nn.Module):
    """An embedding of the model's own kind, such as one that scales, over a table of the rows that a step needs."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.table = embedding.weight.detach()
        embedding.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        embedding.padding_idx = None  # of gradients alone, and beyond the rows of a step
        self._embedding = embedding

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
    (act,) = module.children()
    if type(module)._apply_gate.__module__ != "transformers.integrations.moe":  # type: ignore[attr-defined]  # untyped
        return None
    gate_ups, downs = ([linear(weight) for weight in parts[name].detach()] for name in ("gate_up_proj", "down_proj"))
    return Experts(gate_ups, downs, act)


def keep_stored(model: PreTrainedModel, quantized: Callable[[nn.Module], Rows | None] = lambda _: None) -> None:
    """Replace the linears, experts and input embedding of a model on the CPU in place, and convert what else it has to
    float32: norms, biases, routers.

    quantized: the weight of a module that stands for a linear with quantised weights; None for another module.
    """
    scratch = Scratch()

    def linear(weight: Tensor) -> StoredLinear:
        return StoredLinear([FloatRows(weight.detach())], None, scratch)

    for name, module in list(model.named_modules()):
        made: nn.Module | None = experts_of(module, linear)
        if (rows := quantized(module)) is None:
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
        if tensor.dtype in STORED:
            tensor.data = tensor.detach().float()
