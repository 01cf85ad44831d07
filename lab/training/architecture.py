"""A lean Llama for training: parameter names and mathematics are those of transformers' `LlamaForCausalLM`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

_FIXED: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 4,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, by the names of transformers' configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


Past = tuple[Tensor, Tensor]  # KV cache of a layer: keys and values, (rows, groups, length, head_dim)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal grouped-query attention by plain matrix products: faster to train on a CPU than torch's flash kernels."""
    rows, heads, length, dim = query.shape
    groups, seen = key.shape[1:3]
    share = heads // groups
    mask = query.new_full((length, seen), float("-inf")).triu(1 + seen - length).repeat(share, 1)
    stacked = query.reshape(rows * groups, share * length, dim)
    scores = torch.baddbmm(mask, stacked, key.reshape(rows * groups, seen, dim).mT, alpha=dim**-0.5)
    return torch.bmm(scores.softmax(-1), value.reshape(rows * groups, seen, dim)).view(rows, heads, length, dim)


class Layer(nn.Module):
    """Attention and gated MLP, each after its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.shape = shape
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.q_proj = nn.Parameter(torch.empty(heads, hidden))
        self.k_proj = nn.Parameter(torch.empty(groups, hidden))
        self.v_proj = nn.Parameter(torch.empty(groups, hidden))
        self.o_proj = nn.Parameter(torch.empty(hidden, heads))
        self.gate_proj = nn.Parameter(torch.empty(inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, inner))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        rows, length, _ = hidden.shape
        shape = self.shape
        heads, groups, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        normed = functional.rms_norm(hidden, (shape.hidden_size,), self.input_layernorm, shape.rms_norm_eps)
        projected = functional.linear(normed, torch.cat((self.q_proj, self.k_proj, self.v_proj)))
        projected = projected.view(rows, length, heads + 2 * groups, dim)
        turned = projected[:, :, : heads + groups]  # queries and keys are rotated together: one pass over memory
        left, right = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-right, left), dim=-1) * sin
        query, key = torch.split(turned.transpose(1, 2), [heads, groups], dim=1)
        value = projected[:, :, heads + groups :].transpose(1, 2)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        mixed = attend(query, key, value)
        hidden = hidden + functional.linear(mixed.transpose(1, 2).reshape(rows, length, heads * dim), self.o_proj)
        normed = functional.rms_norm(hidden, (shape.hidden_size,), self.post_attention_layernorm, shape.rms_norm_eps)
        gate, up = functional.linear(normed, torch.cat((self.gate_proj, self.up_proj))).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, self.down_proj), (key, value)


class Reader(nn.Module):
    """A Llama decoder with tied input and output embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        frequency = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle = torch.outer(torch.arange(shape.max_position_embeddings), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angle.sin()[None, :, None], persistent=False)

    def initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / (2 * self.shape.num_hidden_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                small = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(weight, std=residual if small else 0.02, generator=generator)

    def forward(self, ids: Tensor, past: list[Past] | None = None) -> Tensor:
        """Hidden states after the last norm, (rows, length, hidden); `past` is read and extended in place."""
        start = past[0][0].shape[2] if past else 0
        hidden = functional.embedding(ids, self.embed_tokens)
        cos, sin = (table[:, start : start + ids.shape[1]].to(hidden.dtype) for table in (self.cos, self.sin))
        presents = []
        for index, layer in enumerate(self.layers):
            hidden, present = layer(hidden, cos, sin, past[index] if past else None)
            presents.append(present)
        if past is not None:
            past[:] = presents
        return functional.rms_norm(hidden, (self.shape.hidden_size,), self.norm, self.shape.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens)


def _published(name: str) -> str:
    """Map a parameter name of this module to transformers' name."""
    if name in ("embed_tokens", "norm"):
        return f"model.{name}.weight"
    layers, index, own = name.split(".")
    if own.endswith("layernorm"):
        return f"model.{layers}.{index}.{own}.weight"
    part = "mlp" if own in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.{layers}.{index}.{part}.{own}.weight"


def save_model(directory: Path, shape: Shape, weights: dict[str, Tensor]) -> None:
    """Write bf16 weights and configuration in transformers' format."""
    directory.mkdir(parents=True, exist_ok=True)
    published = {_published(name): weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})
    sizes = asdict(shape)
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    (directory / "config.json").write_text(json.dumps(_FIXED | sizes, indent=1) + "\n")
    generation = {"do_sample": False, "eos_token_id": 4, "pad_token_id": 0, "max_new_tokens": 96}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def load_model(directory: Path) -> Reader:
    """Load a model written by `save_model`, in bf16."""
    config = json.loads((directory / "config.json").read_text())
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    model = Reader(shape).to(torch.bfloat16)
    stored = load_file(directory / "model.safetensors")
    model.load_state_dict({name: stored[_published(name)] for name, _ in model.named_parameters()})
    return model
