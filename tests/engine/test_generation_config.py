"""`generation_config.json` of published models, and malformed ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from paceline.core.sampling.sampler import NO_DEFAULTS, SamplingDefaults
from paceline.engine.model_config import FILE, sampling_defaults
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


def test_a_model_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == NO_DEFAULTS


@pytest.mark.parametrize(
    "config",
    [
        '{"temperature": 7}',
        '{"temperature": NaN}',
        '{"temperature": true}',
        '{"top_k": 2.5}',
        "[1]",
        "not JSON",
    ],
)
def test_invalid_values_are_ignored(tmp_path: Path, config: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, config) == NO_DEFAULTS
    assert caplog.text or config == "[1]"


def test_the_demo_pair_is_greedy() -> None:
    assert sampling_defaults(DEVICE) == sampling_defaults(CLOUD) == SamplingDefaults(temperature=0.0)
