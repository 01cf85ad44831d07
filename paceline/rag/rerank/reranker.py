"""Rerankers: the protocol, and loading by name. Only those that need torch or transformers import them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.rag.minilm import MiniLMEmbedder
from paceline.rag.rerank.cross_encoder import CrossEncoder
from paceline.rag.rerank.late_interaction import LateInteraction, TokenEncoder

DEFAULT = "late-interaction"

Scores = NDArray[np.float32]  # (passages,)


class Reranker(Protocol):
    """Safe to use from several threads. A score depends on its query and its passage, not on the other passages."""

    @property
    def name(self) -> str:
        """Scores of rerankers with different names are not comparable."""

    def score(self, query: str, passages: Sequence[str]) -> Scores:
        """(len(passages),): higher is more relevant. What is longer than the model's window is cut at its end."""


def best_first(scores: Scores) -> list[int]:
    """Indices of the passages, the highest score first, in the order given where scores are equal."""
    return [int(i) for i in np.argsort(-scores, kind="stable")]


def load_reranker(name: str = DEFAULT, *, encoder: TokenEncoder | None = None) -> Reranker:
    """'late-interaction', or a cross-encoder: a folder, or the name of one that was downloaded before.

    encoder: of late interaction; None loads MiniLM a second time, beside the document store's.
    Raises ConfigError when it cannot be loaded.
    """
    if name == DEFAULT:
        return LateInteraction(encoder or MiniLMEmbedder())
    return CrossEncoder(name)
