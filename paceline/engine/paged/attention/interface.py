"""The seam between transformers' models and our attention over the paged KV cache.

transformers calls `attention` by name (`AttentionInterface.register`) with the metadata of the running forward, which
store the rows' K and V and attend: `gathered` or `tiled`, as `backends` chooses. Knows nothing of models or of either
way. Attention sinks are not handled: they raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NAME = "paceline"  # registered with transformers, for `config._attn_implementation`


class Attending(Protocol):
    """Argument `attn_metadata` of `attention`. Valid for one forward."""

    rotary: tuple[Tensor, Tensor] | None  # set by the first fused layer, read by the others

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        """Store K and V of the batch's rows, then attend.

        query: (rows, heads, dim); key, value: (rows, kv heads, dim). Returns (rows, heads, value dim).
        """


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention parameters of one layer."""

    scale: float
    window: int | None = None  # positions a row attends to, its own included
    softcap: float | None = None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attn_metadata: Attending,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: (1, heads, rows, dim); key, value: (1, kv heads, rows, dim).

    `attention_mask` is None: transformers makes no mask for a name without a registered mask function.
    """
    if attention_mask is not None or s_aux is not None or position_bias is not None:
        raise NotImplementedError("masks, attention sinks and position biases of a model's own are not handled")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    params = LayerAttention(scale, sliding_window, softcap)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attn_metadata.attend(layer, query, key, value, params)[None], None
