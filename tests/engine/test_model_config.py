"""A model's configuration as it is read: recommended settings, and sizes by which its operations are counted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from transformers import GPT2Config, PretrainedConfig, Qwen2Config

from paceline.core.offloading import ModelShape
from paceline.core.sampling.sampler import NO_DEFAULTS, SamplingDefaults
from paceline.engine.model_config import FILE, sampling_defaults, shape_of
from paceline.models import CLOUD, DEVICE


def read(directory: Path, text: str) -> SamplingDefaults:
    (directory / FILE).write_text(text)
    return sampling_defaults(directory)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
        ),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(temperature=0.6)),
        ({"eos_token_id": 4, "max_new_tokens": 96}, NO_DEFAULTS),
    ],
)
def test_recommended_settings_are_read(tmp_path: Path, config: dict[str, object], expected: SamplingDefaults) -> None:
    assert read(tmp_path, json.dumps(config)) == expected


@pytest.mark.parametrize(
    "config",
    ['{"temperature": 7}', '{"temperature": NaN}', '{"temperature": true}', '{"top_k": 2.5}', "[1]", "not JSON"],
)
def test_invalid_values_are_ignored(tmp_path: Path, config: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, config) == NO_DEFAULTS
    assert caplog.text or config == "[1]"


def test_the_demo_pair_is_greedy_and_a_model_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == NO_DEFAULTS
    assert sampling_defaults(DEVICE) == sampling_defaults(CLOUD) == SamplingDefaults(temperature=0.0)


# ---- sizes by which a model's operations are counted ----------------------------------------------------------------
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
