"""A random-weight model of Qwen2's architecture, of which benches measure the speed: it does not depend on the weights.

Sampling does depend on how even the distributions are: `spread_logits` scales them to those of a trained model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

SPREAD: Final = 4.8  # standard deviation of the logits, about that of a trained model
STD: Final = 0.02  # of the weights


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; by default those of Qwen2.5-0.5B."""

    layers: int = 24
    hidden: int = 896
    inner: int = 4864
    heads: int = 14
    kv_heads: int = 2
    vocab: int = 151_936
    positions: int = 8192
    tied: bool = True  # input and output embeddings
    small: bool = False  # below the size at which a server would choose bfloat16


def random_model(shape: Shape, dtype: torch.dtype, *, pad_token_id: int | None = None) -> PreTrainedModel:
    """On torch's default device, the same weights each time, with sdpa attention. No id is an end token."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        initializer_range=STD,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=pad_token_id,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train(False)
    model.requires_grad_(False)
    return model


def spread_logits(model: PreTrainedModel, ids: range) -> None:
    """Logits of these ids get a standard deviation of `SPREAD`; those of all others are 0, some twenty below the
    highest, so that they are not sampled."""
    with torch.no_grad():
        embeddings = model.get_parameter("lm_head.weight")  # (vocab, hidden), the input's too where they are tied
        embeddings[: ids.start] = 0.0
        embeddings[ids.stop :] = 0.0
        model.get_parameter("model.norm.weight").fill_(SPREAD / (STD * math.sqrt(embeddings.shape[1])))


def add_noise(model: PreTrainedModel, share: float) -> None:
    """Add noise to the output's weights, by their own deviation; rows of ids that are not sampled stay 0."""
    with torch.no_grad():
        weights = model.get_parameter("lm_head.weight")
        weights.mul_(1.0 + share * torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)))
