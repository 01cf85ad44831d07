"""Folders converted to quantised GGUF files, against the package that defines the blocks, torch and llama.cpp."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.llama_cpp.engine import load_gguf
from paceline.engine.loader import load_model, quiet
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError
from paceline.hub import quantize
from paceline.hub.gguf import GgufFile, described
from paceline.hub.quantize import Quantization, quantized, write_quantized
from paceline.models import DEVICE
from paceline.system import lock
from tests.engine.checkpoints import ARCHITECTURES, VOCAB, recurrent, save

_SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    **{name: ARCHITECTURES[name] for name in ("llama", "qwen2", "qwen3", "gemma2")},
    "gemma": lambda: GemmaConfig(**_SIZES, **_HEADS, head_dim=16),
    "llama3": lambda: LlamaConfig(
        **_SIZES, **_HEADS, rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192}
    ),
    "linear": lambda: LlamaConfig(**_SIZES, **_HEADS, rope_parameters={"rope_type": "linear", "factor": 2.0}),
}
TOKENS = [(7 * i * i + 3 * i) % VOCAB for i in range(30)]


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "q4_0"), *zip(CONFIGS, itertools.cycle(("q8_0", "q4_0")), strict=False)]
)
def test_a_converted_model_is_its_weights_quantised_and_llama_cpp_scores_as_torch_does_with_these(
    tmp_path: Path, name: str, kind: Quantization
) -> None:
    dtype = torch.float32 if kind == "q8_0" else torch.bfloat16
    with quiet():
        save(CONFIGS[name](), tmp_path / "folder", dtype=dtype)
    write_quantized(tmp_path / "folder", tmp_path / "model.gguf", kind)
    file = GgufFile.open(tmp_path / "model.gguf")
    original = json.loads((tmp_path / "folder" / "config.json").read_text())
    differing = {key for key, value in file.config().items() if key in original and original[key] != value}
    assert differing <= {"rms_norm_eps", "torch_dtype", "eos_token_id", "bos_token_id"}, differing
    weights = {key: tensor.float().numpy() for key, tensor in load_file(tmp_path / "folder/model.safetensors").items()}
    kept = dict(file.tensors())
    assert kept.keys() == weights.keys()
    for key, values in weights.items():
        is_fine = "embed_tokens" in key or "lm_head" in key
        block = gguf.GGMLQuantizationType["Q8_0" if is_fine else kind.upper()]
        if values.ndim > 1 and values.shape[-1] % 32 == 0:
            values = gguf.dequantize(gguf.quantize(values, block), block)
        np.testing.assert_allclose(kept[key], values, rtol=1e-6, atol=1e-6)
    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
        model.load_state_dict({key: torch.tensor(values) for key, values in kept.items()}, strict=False)
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1).numpy()
    engine = load_gguf(described(tmp_path / "model.gguf", tmp_path / "folder"), name=name, kv_rows=4 * 96, threads=1)
    (rows,) = engine.forward(Batch((Segment(SeqId(1), 0, tuple(TOKENS), logits="all"),))).dists
    found = np.log([row.probs for row in rows])
    # llama.cpp rounds activations to 8 bits as well.
    assert np.abs(found - expected).mean() < 0.005 * np.ptp(expected)
    assert np.mean(found.argmax(-1) == expected.argmax(-1)) > 0.9


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (recurrent, "its architecture mamba is not known here; known are llama, qwen2"),
        (ARCHITECTURES["qwen2windowed"], "windows in some layers"),
        (ARCHITECTURES["mistral"], "its attention has a window"),
        (lambda: LlamaConfig(**_SIZES, **_HEADS, hidden_act="gelu"), "its activation is gelu"),
        (
            lambda: LlamaConfig(**_SIZES, **_HEADS, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "scaled as dynamic with factor",
        ),
        (lambda: Qwen3Config(**_SIZES, **_HEADS, attention_bias=True), "its attention has biases"),
        (
            lambda: Gemma2Config(**_SIZES, **_HEADS, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=False),
            "its output has weights of its own",
        ),
        (
            lambda: Qwen2Config(
                **_SIZES, **_HEADS, rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192}
            ),
            "scaled as llama3",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused_with_the_reason(
    tmp_path: Path, config: Callable[[], PretrainedConfig], said: str
) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"cannot be converted for llama\.cpp: .*{said}.*Leave --quantize out"):
        write_quantized(tmp_path, tmp_path / "model.gguf", "q8_0")


def test_a_model_is_converted_once_whoever_asks_for_it_and_keeps_its_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load_model(DEVICE, quantize="q8_0", kv_rows=256, threads=1)
    assert (model.engine.info.dtype, model.engine.info.backend) == ("q8_0", "llama_cpp")
    assert model.tokenizer.fingerprint == Tokenizer.load(DEVICE).fingerprint
    made = list((tmp_path / "paceline" / "quantized").glob("*.gguf*"))
    assert len(made) == 1
    monkeypatch.setattr(quantize, "write_quantized", None)  # not called again
    load_model(DEVICE, quantize="q8_0", kv_rows=256, threads=1)
    made[0].rename(tmp_path / "whole")
    found: list[Path] = []
    with made[0].with_suffix(".lock").open("w") as held:  # another process is at it
        assert lock(held.fileno(), alone=True)
        waiting = threading.Thread(target=lambda: found.append(quantized(DEVICE, "q8_0").path))
        waiting.start()
        (tmp_path / "whole").rename(made[0])
    waiting.join(timeout=60)
    assert found == made


@pytest.mark.parametrize(("given", "said"), [({"backend": "paged"}, "leave one of them out"), ({}, "is a GGUF file")])
def test_what_cannot_be_converted_here_is_a_sentence(tmp_path: Path, given: dict[str, str], said: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=said):
        load_model(tmp_path / "tiny.gguf" if not given else DEVICE, quantize="q8_0", **given)  # type: ignore[arg-type]
