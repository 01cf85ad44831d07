"""Fingerprints of embedders: equal for the same weights, whatever they are called."""

from __future__ import annotations

import torch

from paceline.encoder import installed_weights, package_directory
from paceline.rag.embedder import MiniLMEmbedder, SentenceTransformerEmbedder, weights_fingerprint

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
