"""Embedders: the protocol, the hashing one, those of sentence-transformers, and loading by name.

Knows nothing of documents. torch and sentence-transformers are imported only when an embedder that needs them is used.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.rag.fingerprint import weights_fingerprint
from paceline.rag.records import Vectors

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = "minilm"
_BATCH_TEXTS = 16  # texts between two calls of the progress callback
_THREADS = 2  # batches embedded at once, where there are as many cores

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
    """A progress callback that does nothing."""
    del done, total


def embed_all(embedder: Embedder, texts: Sequence[str], progress: ProgressCallback = no_progress) -> Vectors:
    """(len(texts), dimensions), embedded a few at a time, on two cores, with a call of `progress` after each batch."""
    progress(0, len(texts))
    batches = [texts[start : start + _BATCH_TEXTS] for start in range(0, len(texts), _BATCH_TEXTS)]
    if len(batches) < 2:
        vectors = embedder.embed(texts)
        progress(len(texts), len(texts))
        return vectors
    parts: list[Vectors] = []
    with ThreadPoolExecutor(min(_THREADS, num_cores())) as threads:
        try:
            for part in threads.map(embedder.embed, batches):
                parts.append(part)
                progress(min(len(parts) * _BATCH_TEXTS, len(texts)), len(texts))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return np.concatenate(parts)


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HashEmbedder:
    """Feature hashing of words: texts are similar iff they share words. No model, no download; for `--model fake` and
    tests."""

    name = served_name = fingerprint = "hash"
    max_tokens: int | None = None
    dimensions = 256

    def count(self, text: str) -> int:
        return len(_WORD.findall(text))

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in _WORD.findall(text.lower()):
                digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()
                row[int.from_bytes(digest[:4], "little") % self.dimensions] += 1 if digest[4] & 1 else -1
        return unit(np.sign(vectors) * np.sqrt(np.abs(vectors)))  # the root keeps a frequent word from dominating


_WORD = re.compile(r"\w+")


class _SentenceTransformer(Protocol):
    """The part of sentence_transformers.SentenceTransformer used here."""

    def encode(self, sentences: list[str], *, normalize_embeddings: bool, show_progress_bar: bool) -> Vectors: ...

    def tokenize(self, texts: list[str]) -> dict[str, NDArray[np.int64]]: ...

    def get_max_seq_length(self) -> int | None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def modules(self) -> Iterator[object]: ...


def _is_out_of_reach(name: str) -> bool:
    """True if the hub cannot be asked for the model now: then what is on this machine must do, in whichever cache the
    package finds it; told to look there alone, it does not ask for a minute before it gives up."""
    from paceline.hub.download import Unreachable, remote_size
    from paceline.hub.names import HubName

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
            model = package.SentenceTransformer(
                name,
                trust_remote_code=False,
                local_files_only=Path(name).is_dir() or _is_out_of_reach(name),
                model_kwargs={"use_safetensors": True},
            )
            self._model = cast(_SentenceTransformer, model)
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
        from paceline.rag.minilm import MiniLMEmbedder

        return MiniLMEmbedder()
    return HashEmbedder() if name == "hash" else SentenceTransformerEmbedder(name)
