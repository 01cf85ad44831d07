"""Weights: in the file's format, packed, and in memory once; what they score, where they lie, what the log says."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine import layer_kernel, weights
from paceline.engine.base import Engine
from paceline.engine.loader import EngineOptions, load_engine, quiet
from paceline.engine.paged.packed_linear import PackedLinear, can_pack, padded_rows, release_mapped_weights
from paceline.engine.sampling.sampler import DeviceLogits
from paceline.engine.stage import load_stage
from paceline.engine.tensors import dists
from paceline.engine.weights import FloatRows, Scratch, StoredLinear, choose_format
from paceline.errors import ConfigError
from tests.engine.checkpoints import save, sizeable
from tests.engine.conftest import load_stored
from tests.engine.quantized_checkpoints import FORMATS, quantize
from tests.engine.trials import assert_same, scratch

MAPPED = pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
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


@pytest.mark.parametrize("kind", ["llama4_text", "minimax_m3_vl_text"])
def test_models_that_look_at_their_table_or_have_experts_of_another_kind_are_served(tmp_path: Path, kind: str) -> None:
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=96, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    engine = load_stored(save(config, tmp_path, dtype=torch.bfloat16), kind)
    assert engine.info.dtype == "float32" and len(scratch(engine, TOKENS)) == len(TOKENS)


def test_a_linear_of_many_tiles_is_one_product() -> None:
    torch.manual_seed(2)
    weights = [torch.randn(rows, 3000).to(dtype) for rows, dtype in ((500, torch.bfloat16), (70, torch.float32))]
    x, bias = torch.randn(2, 5, 3000), torch.randn(570)
    linear = StoredLinear([FloatRows(weight) for weight in weights], bias, Scratch())
    with torch.inference_mode():
        found = linear(x)
    expected = torch.nn.functional.linear(x, torch.cat([weight.float() for weight in weights]), bias)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@MAPPED
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


# ---- weights are in memory once: what was packed leaves the mapping of its file -------------------------------------
def mapped_bytes(file: Path) -> int:
    """Resident bytes of this file's mappings in this process."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


@MAPPED
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_leave_the_mapping_of_their_file(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_kernel, "kernel", lambda: None)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(sizeable(tied=tied)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 16_000_000
    engine = load_engine(tmp_path, EngineOptions(backend="paged", kv_rows=64, dtype="float32", device="cpu"), name="m")
    embedding = 4000 * 256 * 4 + 300_000  # its rows come in as tokens need them, and pages beside them
    assert mapped_bytes(file) < embedding
    tokens = tuple(range(10, 40))
    (found,) = engine.forward(Batch((Segment(SeqId(1), 0, tokens),))).dists[0]
    assert mapped_bytes(file) < embedding
    plain = load_engine(tmp_path, EngineOptions(backend="hf", dtype="float32", device="cpu"), name="m")
    (expected,) = plain.forward(Batch((Segment(SeqId(1), 0, tokens),))).dists[0]
    assert found.argmax() == expected.argmax()
    assert found.probs == pytest.approx(expected.probs, abs=1e-5)


@MAPPED
def test_a_mapping_with_written_pages_stays_as_it_is(tmp_path: Path) -> None:
    """Another user of the file may have changed its tensors in place; those changes are in no file."""
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(200_000)}, file)
    with safe_open(file, framework="pt") as opened:
        weight = opened.get_tensor("weight")
    weight[70_000] = 5.0
    release_mapped_weights(nn.Linear(2, 2))
    assert weight[70_000] == 5.0 and weight.sum() == 200_004.0


@MAPPED
def test_rows_of_an_embedding_do_not_stay(tmp_path: Path) -> None:
    """Each brings its neighbours in: a few hundred requests would bring all of it."""
    file = tmp_path / "model.safetensors"
    count, width = 20_000, 512
    save_file({"weight": torch.arange(count * width, dtype=torch.float32).view(count, width)}, file)
    with safe_open(file, framework="pt") as opened:
        embedding = nn.Embedding(count, width, _weight=opened.get_tensor("weight"))
    release_mapped_weights(embedding)
    rows = torch.arange(0, count, 40)
    most = 0
    for some in rows.split(50):
        with torch.inference_mode():
            found = embedding(some)
        most = max(most, mapped_bytes(file))
        assert found[:, 0].tolist() == [float(row * width) for row in some.tolist()]
    assert 0 < most < count * width * 4 / 2


# ---- packed linears compute few row counts, and what a plain linear does at all of them -----------------------------
STEP = 512  # rows of a step by default


def test_few_row_counts_are_computed_and_none_is_padded_by_more_than_an_eighth() -> None:
    counts = [padded_rows(rows) for rows in range(1, STEP + 1)]
    assert len(set(counts)) == 56, "code is generated and kept for each"
    assert all(rows <= count <= rows * 1.125 for rows, count in enumerate(counts, 1))
    assert counts[:16] == list(range(1, 17)), "small steps are not padded"
    assert counts == [padded_rows(count) for count in counts]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_padding_changes_no_row(leading: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(48, 40, bias=has_bias)
    weight, bias = plain.weight.detach(), None if plain.bias is None else plain.bias.detach()
    if not can_pack(weight):
        pytest.skip("this machine has no packed kernel")
    packed = PackedLinear(weight, bias)
    with torch.inference_mode():
        for rows in (1, 8, 9, 17, 31, 32, 33, 100):
            x = torch.randn(*leading, rows, 48)
            found = packed(x)
            assert found.shape == (*leading, rows, 40)
            torch.testing.assert_close(found, functional.linear(x, weight, bias), atol=1e-5, rtol=1e-4)


# ---- quantised checkpoints score as the float model that their numbers stand for ------------------------------------
FEW_TOKENS = [(7 * i * i + 3 * i) % 97 for i in range(20)]


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
    (logits,) = engine.forward(Batch((Segment(SeqId(1), 0, tuple(FEW_TOKENS), logits="all"),))).logits
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
