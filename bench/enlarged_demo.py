"""A demonstration model in the shape of a larger one: real text and real agreement of a pair, at a real model's cost.

The small model is a corner of the large one. Everything else of the weights is 0 and is computed all the same; layers
of it between the small model's add nothing. Logits of the small model's ids are its own but for rounding (and the
vocabulary's other ids are never sampled), so its tokenizer, its texts, and how often a draft model's drafts are
accepted, stay. Meant for float32: what tells the ids apart would round others' logits in bfloat16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .random_model import Shape

MARK: Final = 0.05  # of one more coordinate of the residual stream, the same for every id; theirs are about 0.2
GAP: Final = 20.0  # least by which, about, logits of ids that the small model lacks are lowered
QWEN_05B: Final = Shape()
QWEN_15B: Final = Shape(layers=28, hidden=1536, inner=8960, heads=12)


@dataclass(frozen=True, slots=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    vocab: int


def enlarge(source: Path, shape: Shape, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of `source` in this shape to the folder `target`, which is made.

    Of `shape`, heads have the source's size and the embeddings are one matrix. Raises ValueError where the source does
    not fit in.
    """
    config = json.loads((source / "config.json").read_text())
    small = _Sizes(
        config["num_hidden_layers"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
    )
    fits = (
        small.layers <= shape.layers
        and small.hidden < shape.hidden
        and config["intermediate_size"] <= shape.inner
        and small.kv_heads <= shape.kv_heads
        and small.heads // small.kv_heads <= shape.heads // shape.kv_heads
        and small.vocab <= shape.vocab
    )
    if not fits:
        raise ValueError("the small model does not fit into the large shape")
    target.mkdir(parents=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    config |= {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "rms_norm_eps": config["rms_norm_eps"] * small.hidden / shape.hidden,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    with safe_open(source / "model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  # no mapping
    grown = _weights(weights, small, shape)
    save_file({name: each.to(dtype) for name, each in grown.items()}, target / "model.safetensors")
    return target


def _weights(weights: Mapping[str, torch.Tensor], small: _Sizes, shape: Shape) -> dict[str, torch.Tensor]:
    places = {round((number + 1) * shape.layers / small.layers) - 1: number for number in range(small.layers)}
    scale = (small.hidden / shape.hidden) ** 0.5  # a root mean square over more coordinates is less
    found: dict[str, torch.Tensor] = {}
    for place in range(shape.layers):
        number = places.get(place)
        layer = {part: None if number is None else weights[f"model.layers.{number}.{part}.weight"] for part in _PARTS}
        for part, weight in _layer(layer, small, shape, scale).items():
            found[f"model.layers.{place}.{part}.weight"] = weight
    embeddings = torch.zeros(shape.vocab, shape.hidden)
    embeddings[: small.vocab, : small.hidden] = weights["model.embed_tokens.weight"]
    embeddings[:, small.hidden] = -MARK
    embeddings[: small.vocab, small.hidden] = MARK
    norm = torch.zeros(shape.hidden)
    norm[: small.hidden] = weights["model.norm.weight"] * scale
    norm[small.hidden] = GAP / (2 * MARK**2) * scale * _LARGEST
    return found | {"model.embed_tokens.weight": embeddings, "model.norm.weight": norm}


_PARTS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_LARGEST: Final = 50.0  # root mean square of the last hidden row, at most, about


def _layer(
    layer: Mapping[str, torch.Tensor | None], small: _Sizes, shape: Shape, scale: float
) -> dict[str, torch.Tensor]:
    """One layer's weights; where the small model has none there, one that adds nothing."""
    head = small.head
    each = shape.heads // shape.kv_heads  # heads of a group, whose first ones are the small model's
    rows = [
        (number // (small.heads // small.kv_heads)) * each + number % (small.heads // small.kv_heads)
        for number in range(small.heads)
    ]
    query = torch.cat([torch.arange(row * head, (row + 1) * head) for row in rows])
    key = torch.arange(small.kv_heads * head)
    hidden = torch.arange(small.hidden)
    sizes = {"self_attn.q_proj": shape.heads * head, "self_attn.k_proj": shape.kv_heads * head}
    sizes["self_attn.v_proj"] = sizes["self_attn.k_proj"]
    found: dict[str, torch.Tensor] = {}
    for part, weight in layer.items():
        if part.endswith("layernorm"):
            grown = torch.zeros(shape.hidden)
            if weight is not None:
                grown[: small.hidden] = weight * scale
        elif part in ("self_attn.o_proj", "mlp.down_proj"):
            attention = part.startswith("self_attn")
            grown = torch.zeros(shape.hidden, sizes["self_attn.q_proj"] if attention else shape.inner)
            if weight is not None:
                columns = query if attention else torch.arange(weight.shape[1])
                grown[hidden[:, None], columns[None, :]] = weight
        else:
            grown = torch.zeros(sizes.get(part, shape.inner), shape.hidden)
            if weight is not None:
                lines = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
                grown[lines.get(part, torch.arange(weight.shape[0]))[:, None], hidden[None, :]] = weight
        found[part] = grown
    return found
