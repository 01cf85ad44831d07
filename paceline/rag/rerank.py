"""Reranking: the passages of a search scored again, each together with the query.

The default is late interaction over the token vectors of the embedder; a cross-encoder is any model of transformers
that scores a pair of texts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.hub.cache import find, need_torch, quiet, served_name
from paceline.rag.embedder import ComputeThreads, MiniLMEmbedder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Cross-encoders: a model of transformers that reads query and passage together and gives their relevance.
#
# Weights are safetensors on this machine; nothing is downloaded, and code shipped with a model is never run. On the
# CPU, in a thread of its own or of a processing unit, like the embedder.


MAX_TOKENS = 512  # of query and passage together, special tokens included; less where the model reads less


class CrossEncoder:
    """Loaded when made. Scores are the model's logits, of which only the order means something.

    With two labels, the score is by how much the second is preferred. Each pair is a forward of its own, so that its
    score does not depend on the other passages. Where a pair is too long, its longer text is cut.
    """

    def __init__(self, path_or_name: str | Path) -> None:
        """Raises ConfigError when it is not here, is no cross-encoder or cannot be loaded."""
        directory = find(path_or_name, download=False)
        self.name = served_name(path_or_name)
        self._model, self._tokenizer = loaded_encoder(
            directory, "AutoModelForSequenceClassification", "cross-encoder", "a model for text ranking, with one label"
        )
        if (labels := self._model.config.num_labels) not in (1, 2):
            raise ConfigError(f"{directory} is no cross-encoder: it has {labels} labels instead of one.")
        self._max_tokens = max_tokens(self._model, self._tokenizer, MAX_TOKENS)
        self._tells_texts_apart = getattr(self._model.config, "type_vocab_size", 0) > 1  # as BERT does, and RoBERTa not
        self._compute = ComputeThreads(1, "paceline-rerank", limit=limit_threads)

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


def limit_threads(threads: int) -> None:
    """Limit torch's cores in this thread only.

    torch's setting applies to the calling thread and is also the default of later threads; a short-lived thread
    restores that default.
    """
    import torch

    default = torch.get_num_threads()
    torch.set_num_threads(threads)
    restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
    restorer.start()
    restorer.join()


def loaded_encoder(
    directory: Path, architecture: str, what: str, wanted: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of transformers with a head, and its tokenizer. architecture: an Auto class. what, wanted: what it is to
    be, for errors. Raises ConfigError."""
    need_torch(f"A {what}")
    try:
        import torch
        import transformers

        with quiet():
            loaded = getattr(transformers, architecture).from_pretrained(
                directory,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # bad files, unknown architectures and odd configurations raise errors of any type
        raise ConfigError(f"{directory} cannot be loaded as a {what}: {error}") from error
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := sorted(report["missing_keys"]):  # transformers would make them up at random
        raise ConfigError(f"{directory} is no {what}: it lacks {missing[0]}. Give {wanted}.")
    model.requires_grad_(False)
    model.train(False)
    return model, tokenizer


def max_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, most: int) -> int:
    """Tokens that a model reads at once, and at most so many."""
    return min(most, int(getattr(model.config, "max_position_embeddings", most)), int(tokenizer.model_max_length))


# Late interaction: each token of the query finds the most similar token of the passage (MaxSim of ColBERT, Khattab and
# Zaharia 2020, eq. 3), here as the mean over the query's tokens, so that scores of short and long queries compare.
#
# The vectors are those that MiniLM averages into its embeddings, which were not trained for this. Measured on the ten
# paragraphs of 875 that the embeddings find for a question of SQuAD: the right one is first for 79 % of 200 questions,
# and for 62 % by the cosine of embeddings. Of those that 120 questions of HotpotQA need, out of ten each, 62 % come
# first, 60 % by cosine. Nothing is stored: a passage costs a forward of the encoder each time, 17 ms for 160 tokens
# on one core, 65 without the kernel.


NO_TOKENS = -1.0  # score of a passage without tokens: the least possible
_AT_ONCE = 16  # passages whose vectors are in memory together, 6 MB at most with MiniLM


class LateInteraction:
    """Scores are means of cosines, from -1 to 1; all 0 for a query without tokens."""

    def __init__(self, encoder: MiniLMEmbedder) -> None:
        self._encoder = encoder
        self.name = f"late-interaction-{encoder.name}"

    def score(self, query: str, passages: Sequence[str]) -> NDArray[np.float32]:
        """(len(passages),). Raises ConfigError when the encoder's weights are damaged."""
        scores = np.zeros(len(passages), dtype=np.float32)
        if not passages:
            return scores
        (asked,) = self._encoder.token_vectors([query])
        if not len(asked):
            return scores
        for start in range(0, len(passages), _AT_ONCE):
            for i, found in enumerate(self._encoder.token_vectors(passages[start : start + _AT_ONCE]), start):
                scores[i] = (asked @ found.T).max(axis=1).mean() if len(found) else NO_TOKENS
        return scores


# Rerankers: the protocol, and loading by name. Only those that need torch or transformers import them.


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


def load_reranker(name: str = DEFAULT, *, encoder: MiniLMEmbedder | None = None) -> Reranker:
    """'late-interaction', or a cross-encoder: a folder, or the name of one that was downloaded before.

    encoder: of late interaction; None loads MiniLM a second time, beside the document store's.
    Raises ConfigError when it cannot be loaded.
    """
    if name == DEFAULT:
        return LateInteraction(encoder or MiniLMEmbedder())
    return CrossEncoder(name)
