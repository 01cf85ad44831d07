"""Loading an engine from a path or a name: accepted models, and the wording of refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertLMHeadModel,
    DiffLlamaConfig,
    ElectraConfig,
    GPTNeoConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
    XLNetConfig,
    XLNetLMHeadModel,
)

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine import layer_kernel
from paceline.engine.base import Engine
from paceline.engine.loader import EngineOptions, fingerprint, load_engine, load_model
from paceline.engine.model_config import max_positions, windows
from paceline.engine.weights import choose_format
from paceline.errors import ConfigError
from paceline.hub.gguf import sampled
from paceline.models import DEVICE
from tests.core.dists import total_variation
from tests.engine.checkpoints import ARCHITECTURES, save
from tests.engine.trials import scratch


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may damage."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "copied")


@pytest.mark.parametrize("name", ["./no/such/model", "/no/such/model", "models/with/three/parts", "fake:x"])
def test_a_missing_path_is_a_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match="Give an existing directory"):
        load_model(name)


def test_a_file_of_another_kind_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    for name in ("blob", str(tmp_path / "blob")):
        with pytest.raises(ConfigError, match=r"is a file: give a model's folder, or a GGUF file whose name ends in"):
            load_model(name)


def test_a_directory_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)


def lacking(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})


def unknown(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "no-such-model"}))


def cut(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def configured(**changes: object) -> Callable[[Path], object]:
    def change(copied: Path) -> None:
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (configured(vocab_size=8), "other shapes than its config.json says"),
        (configured(rope_scaling={"type": "funky", "factor": 2}), "not known here: .*funky"),
        (lacking, "lacks 1 tensors"),  # they are not made up
        (unknown, "cannot be loaded"),
        (cut, r"damaged or was cut .* again"),
        (lambda copied: (copied / "config.json").write_bytes(b"\x00" * 100), "cannot be loaded"),
        (lambda copied: (copied / "model.safetensors").write_bytes(b"\x00" * 100), "cannot be loaded"),
    ],
    ids=["shapes", "positions", "lacking", "unknown", "cut", "no configuration", "no weights"],
)
def test_a_damaged_model_is_a_sentence(copied: Path, damage: Callable[[Path], object], sentence: str) -> None:
    damage(copied)
    with pytest.raises(ConfigError, match=sentence):
        load_engine(copied, name="x")


def test_tensors_that_are_not_used_are_told(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    configured(num_hidden_layers=1)(copied)
    load_engine(copied, name="x")
    assert re.search(r"x: \d+ tensors are no part of its architecture, such as model\.layers\.1\.", caplog.text)


def test_the_tokenizer_of_a_larger_vocabulary_is_another_models(copied: Path) -> None:
    for file in DEVICE.glob("tokenizer*.json"):
        shutil.copy(file, copied)
    with pytest.raises(ConfigError, match=r"its tokenizer has \d+ tokens, its model \d+"):
        load_model(copied)


SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (BertConfig(**SMALL), "auto"),
        (RobertaConfig(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2), "hf"),
        (ElectraConfig(**SMALL), "auto"),
    ],
    ids=["bert", "roberta", "electra"],
)
def test_an_encoder_that_reads_both_ways_is_refused_with_a_sentence(
    tmp_path: Path, config: PretrainedConfig, backend: Literal["auto", "hf"]
) -> None:
    torch.manual_seed(1)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="reads a text both ways, as encoders such as BERT do"):
        load_engine(tmp_path, EngineOptions(backend=backend, dtype="float32"), name="x")


def test_the_same_network_made_to_continue_a_text_is_served(tmp_path: Path) -> None:
    BertLMHeadModel(BertConfig(**SMALL, is_decoder=True)).save_pretrained(tmp_path)
    assert load_engine(tmp_path, name="x").info.backend in ("paged", "hf")


def test_a_network_that_does_something_else_is_refused_in_one_sentence(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "n_head": 2}
    t5 = T5Config(vocab_size=64, d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
    AutoModelForSeq2SeqLM.from_config(t5).save_pretrained(tmp_path / "t5")
    XLNetLMHeadModel(XLNetConfig(**sizes, n_layer=2, d_inner=32)).save_pretrained(tmp_path / "xlnet")
    for folder in ("t5", "xlnet"):
        with pytest.raises(ConfigError) as refused:
            load_engine(tmp_path / folder, EngineOptions(dtype="float32"), name="x")
        assert len(str(refused.value)) < 300 and "causal language model" in str(refused.value)


@pytest.mark.usefixtures("forks")
def test_no_thread_of_openmp_outlives_a_load(checkpoint: Callable[[str], Path]) -> None:
    """With those of the engine's thread they would be more than the cores, and all would sleep between two kernels."""
    subprocess.run([sys.executable, "-c", _COUNTS_THREADS, str(checkpoint("qwen2"))], check=True, timeout=60)


_COUNTS_THREADS = """
import sys, psutil, torch
from pathlib import Path
from paceline.engine.loader import EngineOptions, load_engine
from paceline.engine.paged.engine import PagedEngine

torch.set_num_threads(3)  # which starts threads of another kind
before = psutil.Process().num_threads()
load_engine(Path(sys.argv[1]), EngineOptions("paged", "float32", threads=3), name="x")
while psutil.Process().num_threads() > before:  # those of a thread that has ended take their time
    pass
torch.ones(1 << 20).sum()
assert psutil.Process().num_threads() == before + 2
"""


def test_the_tokenizer_is_looked_for_before_the_weights_are_read(copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_model(copied)


def test_fingerprints_follow_the_content_and_not_the_place(copied: Path, checkpoint: Callable[[str], Path]) -> None:
    same = fingerprint(checkpoint("llama"))
    assert fingerprint(copied) == same
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copied) != same


@pytest.mark.parametrize("first", [17 << 20, 200 << 20, 299 << 20])
def test_a_file_of_weights_that_differs_in_its_middle_is_another(tmp_path: Path, first: int) -> None:
    """As after a merged adapter: the same size and layout, and one matrix of 1 MiB elsewhere."""
    (file := tmp_path / "weights").touch()
    os.truncate(file, 300 << 20)  # zeros, without room on the disk
    before = sampled(file)
    with file.open("r+b") as stream:
        stream.seek(first)
        stream.write(b"x" * (1 << 20))
    assert sampled(file) != before


def test_bfloat16_scores_stay_near_those_of_float32(
    load: Callable[[str], Engine], checkpoint: Callable[[str], Path]
) -> None:
    options = EngineOptions(backend="paged", dtype="bfloat16", kv_rows=256)
    engine = load_engine(checkpoint("qwen2"), options, name="qwen2")
    assert engine.info.dtype == "bfloat16"
    prompt = [(5 * i + 1) % 97 for i in range(12)]
    pairs = zip(scratch(engine, prompt), scratch(load("paged-qwen2"), prompt), strict=True)
    assert sum(total_variation(a, b) for a, b in pairs) / len(prompt) < 0.1


def test_a_small_model_runs_in_float32_on_a_cpu_whatever_it_is_stored_in(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_kernel, "kernel", lambda: None)
    cpu, half = torch.device("cpu"), PretrainedConfig(dtype=torch.bfloat16)
    chosen = choose_format("auto", cpu, half, copied)
    assert chosen.computed == torch.float32 and not chosen.by_rows
    assert choose_format("bfloat16", cpu, PretrainedConfig(), copied).computed == torch.bfloat16
    assert choose_format("auto", torch.device("cuda"), PretrainedConfig(), copied).computed == torch.bfloat16


def test_a_device_that_is_not_there_is_a_sentence(copied: Path) -> None:
    for device in ("cuda:99", "abacus"):
        with pytest.raises(ConfigError, match="Use cpu or auto"):
            load_engine(copied, EngineOptions(device=device), name="x")


def test_windows_and_context_are_read_from_the_configuration() -> None:
    assert windows(ARCHITECTURES["llama"]()) == {"full_attention": None}
    assert windows(ARCHITECTURES["mistral"]()) == {"sliding_attention": 7}
    assert windows(ARCHITECTURES["gemma2"]()) == {"sliding_attention": 6, "full_attention": None}
    config = ARCHITECTURES["phi3"]()
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 48}
    assert max_positions(config) == 48
    config.rope_parameters = {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32}}
    assert max_positions(config) == 32


@pytest.mark.parametrize("name", ["diffllama", "gpt_neo"])
def test_trees_score_as_chains_do_behind_a_window_that_the_settings_tell_wrongly(tmp_path: Path, name: str) -> None:
    """One has a window in its settings that it does not use, the other uses one that has a name of its own."""
    sizes = {"hidden_size": 32, "vocab_size": 97, "max_position_embeddings": 96, "pad_token_id": 0}
    kinds: dict[str, PretrainedConfig] = {
        "diffllama": DiffLlamaConfig(
            **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48
        ),
        "gpt_neo": GPTNeoConfig(
            **sizes, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=50
        ),
    }
    kinds["diffllama"].sliding_window = 50
    engine = load_engine(save(kinds[name], tmp_path), EngineOptions(device="cpu", dtype="float32"), name=name)
    tokens = tuple((7 * i * i + 3) % 97 for i in range(62))
    engine.forward(Batch((Segment(SeqId(1), 0, tokens[:60], logits="none"),)))
    ((_, *tree),) = engine.forward(Batch((Segment(SeqId(1), 60, (5, *tokens[60:]), (-1, -1, 1), "all"),))).dists
    (chain,) = engine.forward(Batch((Segment(SeqId(2), 0, tokens, logits="all"),))).dists
    assert max(total_variation(one, other) for one, other in zip(tree, chain[-2:], strict=True)) < 1e-4
