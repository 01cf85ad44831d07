"""Weights that stay in the file's format: what they score, where they lie, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.engine import layer_kernel, weights
from paceline.engine.loader import EngineOptions, quiet
from paceline.engine.stage import load_stage
from paceline.engine.tensors import dists
from paceline.engine.weights import FloatRows, Scratch, StoredLinear, choose_format
from tests.engine.checkpoints import sizeable
from tests.engine.conftest import load_stored
from tests.engine.test_weights_memory import mapped_bytes
from tests.engine.trials import assert_same, scratch

TOKENS = [(7 * i * i + 3 * i) % 97 for i in range(40)]


@pytest.mark.parametrize(
    ("backend", "name"),
    [*(("paged", name) for name in ("llama", "gemma3", "gpt2", "opt", "qwen3moe")), ("hf", "gpt2"), ("hf", "qwen3moe")],
)
def test_scores_are_those_of_the_same_weights_in_float32(
    backend: str, name: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(f"half-{name}")
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    engine = load_stored(directory, name, EngineOptions(backend=backend, kv_rows=64))  # type: ignore[arg-type]
    assert (engine.info.dtype, engine.info.backend) == ("float32", backend)
    assert engine.info.num_weights == sum(weight.numel() for weight in model.parameters())
    assert_same(scratch(engine, TOKENS), dists(plain))


def test_a_linear_of_many_tiles_is_one_product() -> None:
    torch.manual_seed(2)
    weights = [torch.randn(rows, 3000).to(dtype) for rows, dtype in ((500, torch.bfloat16), (70, torch.float32))]
    x, bias = torch.randn(2, 5, 3000), torch.randn(570)
    linear = StoredLinear([FloatRows(weight) for weight in weights], bias, Scratch())
    with torch.inference_mode():
        found = linear(x)
    expected = torch.nn.functional.linear(x, torch.cat([weight.float() for weight in weights]), bias)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_in_memory_once_and_in_the_mapping_of_their_file(tmp_path: Path, tied: bool) -> None:
    with quiet():
        AutoModelForCausalLM.from_config(sizeable(tied=tied)).to(torch.bfloat16).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    engine = load_stored(tmp_path, "m", EngineOptions(backend="paged", kv_rows=256, device="cpu"))
    scratch(engine, range(200))
    assert mapped_bytes(tmp_path / "model.safetensors") > (0.9 if tied else 0.7) * size
    model = engine._model  # type: ignore[attr-defined]  # what an engine holds is no part of its contract
    kept = [
        tensor for module in model.modules() for tensor in vars(module).values() if isinstance(tensor, torch.Tensor)
    ]
    kept += [*model.parameters(), *model.buffers()]
    outside = {tensor.data_ptr(): tensor.numel() for tensor in kept if tensor.dtype == torch.float32}
    assert sum(outside.values()) < 0.05 * size, "norms, biases and the buffer of a tile"


def test_a_stage_keeps_its_weights_in_the_file_s_format(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "computes_bfloat16", lambda: False)
    monkeypatch.setattr(weights, "_SMALL_MODEL", 0)
    stage = load_stage(checkpoint("half-llama"), 1, 2, EngineOptions(kv_rows=64, device="cpu"))
    assert stage.info.dtype == "float32"
    assert any(isinstance(module, StoredLinear) for module in stage._model.modules())


def test_the_start_says_what_is_computed_in_which_format_and_why(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="paceline.engine"):
        load_stored(checkpoint("half-llama"), "small", EngineOptions(kv_rows=64))
    assert (
        "small is computed in float32, since this processor does not compute in bfloat16; weights stay in bfloat16 as "
        "in the file, and rows are converted when they are used" in caplog.messages
    )


@pytest.mark.parametrize(
    ("stored", "native", "device", "computed", "by_rows"),
    [
        (torch.bfloat16, True, "cpu", torch.bfloat16, False),
        (torch.bfloat16, False, "cpu", torch.float32, True),
        (torch.float16, True, "cpu", torch.float32, True),
        (torch.float32, False, "cpu", torch.float32, False),
        (torch.float16, False, "cuda", torch.bfloat16, False),
    ],
)
def test_only_what_is_computed_in_another_format_on_a_processor_is_converted_by_rows(
    stored: torch.dtype,
    native: bool,
    device: str,
    computed: torch.dtype,
    by_rows: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "computes_bfloat16", lambda: native)
    monkeypatch.setattr(weights, "_SMALL_MODEL", 0)
    monkeypatch.setattr(layer_kernel, "kernel", lambda: None)
    chosen = choose_format("auto", torch.device(device), PretrainedConfig(dtype=stored), tmp_path)
    assert (chosen.computed, chosen.by_rows) == (computed, by_rows)
    monkeypatch.setattr(layer_kernel, "kernel", object)  # then all weights stay as they are that it can multiply
    chosen = choose_format("auto", torch.device(device), PretrainedConfig(dtype=stored), tmp_path)
    assert (chosen.computed, chosen.by_rows) == (computed, computed == torch.float32)
