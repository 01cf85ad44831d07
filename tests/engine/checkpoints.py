"""Tiny random checkpoints of each architecture, in the files that transformers writes.

Weights are larger than those of an untrained model, so that scores are uneven and errors show.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 97
POSITIONS = 96


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = _COMMON | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON, num_hidden_layers=2, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_COMMON, num_hidden_layers=2),
    "qwen2windowed": lambda: Qwen2Config(
        **_COMMON, num_hidden_layers=2, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_COMMON, num_hidden_layers=2, head_dim=16),
    "mistral": lambda: MistralConfig(**_COMMON, num_hidden_layers=2, sliding_window=7),
    "qwen3moe": lambda: Qwen3MoeConfig(
        **_COMMON, num_hidden_layers=2, head_dim=16, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2
    ),
    "mixtral": lambda: MixtralConfig(
        **_COMMON, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=7
    ),
    "olmoe": lambda: OlmoeConfig(**_COMMON, num_hidden_layers=2, num_experts=8, num_experts_per_tok=3),
    "phi3": lambda: Phi3Config(**_COMMON, num_hidden_layers=2, sliding_window=9),
    "gemma2": lambda: Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        word_embed_proj_dim=32,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, bos_token_id=1, eos_token_id=2
    ),
}


def recurrent() -> PretrainedConfig:
    """An architecture without keys and values."""
    return MambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def sizeable(*, tied: bool) -> PretrainedConfig:
    """Megabytes of weights: enough to see where they lie."""
    return Qwen2Config(
        vocab_size=4000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )


def save(config: PretrainedConfig, directory: Path, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of this configuration, in safetensors."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6.0)
    model.to(dtype).save_pretrained(directory)
    return directory
