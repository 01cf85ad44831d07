"""Quantised checkpoints score as the float model that their numbers stand for; unknown ones are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine
from paceline.engine.loader import EngineOptions, load_engine
from paceline.engine.sampling.sampler import DeviceLogits
from paceline.errors import ConfigError
from tests.engine.quantized_checkpoints import FORMATS, quantize

TOKENS = [(7 * i * i + 3 * i) % 97 for i in range(20)]


@pytest.mark.parametrize("name", FORMATS)
def test_it_scores_as_the_model_that_its_numbers_stand_for(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    packed, plain = quantize(checkpoint("qwen2"), name, tmp_path)
    options = EngineOptions(backend="paged", kv_rows=64, device="cpu")
    engines = [load_engine(folder, options, name=name) for folder in (packed, plain)]
    assert engines[0].info.num_weights == engines[1].info.num_weights
    found, expected = (scores(engine) for engine in engines)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def scores(engine: Engine) -> torch.Tensor:
    (logits,) = engine.forward(Batch((Segment(SeqId(1), 0, tuple(TOKENS), logits="all"),))).logits
    assert isinstance(logits, DeviceLogits)
    return logits.scores


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "mxfp4"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
    ids=lambda settings: settings["quant_method"],
)
def test_a_format_that_is_not_known_is_refused_by_name(
    settings: dict[str, object], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("qwen2"), tmp_path / "copied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=f"quantised as {settings['quant_method']}.* not known here"):
        load_engine(folder, name="x")
