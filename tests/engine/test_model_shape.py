"""Sizes by which a model's operations are counted, from its configuration."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, PretrainedConfig, Qwen2Config

from paceline.core.offloading import ModelShape
from paceline.engine.model_config import shape_of


def test_the_papers_draft_model() -> None:
    """Qwen2.5-0.5B: 14 heads of queries, 2 of keys and values, a gated network; 988 MFLOP a token with the head."""
    config = Qwen2Config(
        num_hidden_layers=24,
        hidden_size=896,
        intermediate_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
    )
    shape = shape_of(config, {"gate_proj", "up_proj", "down_proj", "q_proj"})
    assert shape == ModelShape(24, 896, 4864, kv_share=2 / 14, matrices=3, vocab=151_936)
    parameters = 24 * (2 * 896**2 + 2 * 896 * 128 + 3 * 896 * 4864) + 896 * 151_936
    assert shape.flops(1, 0) == pytest.approx(2.0 * parameters, rel=1e-3), "two operations a weight"


def test_what_is_not_told_or_routed_to_experts_has_no_shape() -> None:
    assert shape_of(GPT2Config(), {"c_fc"}) is None, "its configuration names no inner size"
    assert shape_of(PretrainedConfig(), ()) is None
    mixture = Qwen2Config(num_hidden_layers=2, hidden_size=8, intermediate_size=16, num_attention_heads=2)
    assert shape_of(mixture, {"experts", "gate_proj"}) is None
