"""Cross-encoders: a model of transformers that reads query and passage together and gives their relevance.

Weights are safetensors on this machine; nothing is downloaded, and code shipped with a model is never run. On the CPU,
in a thread of its own or of a processing unit, like the embedder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.hub.folders import find, quiet, served_name
from paceline.rag.compute_threads import ComputeThreads

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_TOKENS = 512  # of query and passage together, special tokens included; less where the model reads less


class CrossEncoder:
    """Loaded when made. Scores are the model's logits, of which only the order means something.

    With two labels, the score is by how much the second is preferred. Each pair is a forward of its own, so that its
    score does not depend on the other passages. Where a pair is too long, its longer text is cut.
    """

    def __init__(self, path_or_name: str | Path, *, threads: int = 1) -> None:
        """threads: cores in use. Raises ConfigError when it is not here, is no cross-encoder or cannot be loaded."""
        directory = find(path_or_name, download=False)
        self.name = served_name(path_or_name)
        self._model, self._tokenizer = _loaded(directory)
        self._max_tokens = _max_tokens(self._model, self._tokenizer)
        self._tells_texts_apart = getattr(self._model.config, "type_vocab_size", 0) > 1  # as BERT does, and RoBERTa not
        self._compute = ComputeThreads(1, "paceline-rerank", threads)

    def score(self, query: str, passages: Sequence[str]) -> NDArray[np.float32]:
        """(len(passages),)"""
        scores = self._compute.run(lambda: [self._score(query, passage) for passage in passages])
        return np.array(scores, dtype=np.float32)

    def _score(self, query: str, passage: str) -> float:
        import torch

        pair = self._tokenizer(
            [query],  # as lists, since an empty passage by itself would not count as a second text
            [passage],
            truncation=True,
            max_length=self._max_tokens,
            return_token_type_ids=self._tells_texts_apart,
            return_tensors="pt",
        )
        with torch.inference_mode():
            logits = self._model(**pair).logits[0]
        return float(logits[-1] - logits[0] if len(logits) == 2 else logits[0])


def _loaded(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        with quiet():
            loaded = AutoModelForSequenceClassification.from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # bad files, unknown architectures and odd configurations raise errors of any type
        raise ConfigError(f"{directory} cannot be loaded as a cross-encoder: {error}") from error
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := sorted(report["missing_keys"]):  # transformers would make them up at random
        raise ConfigError(
            f"{directory} is no cross-encoder: it lacks {missing[0]}. Give a model for text ranking, with one label."
        )
    if model.config.num_labels not in (1, 2):
        raise ConfigError(f"{directory} is no cross-encoder: it has {model.config.num_labels} labels instead of one.")
    model.requires_grad_(False)
    model.train(False)
    return model, tokenizer


def _max_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    positions = int(getattr(model.config, "max_position_embeddings", MAX_TOKENS))
    return min(MAX_TOKENS, positions, int(tokenizer.model_max_length))
