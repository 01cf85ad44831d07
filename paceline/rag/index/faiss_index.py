"""Vectors to nearest ids: FAISS, and the file it is kept in between runs.

Derived data: whatever is wrong with the file, it is built again from the rows it came from. Knows neither texts nor
SQLite. Flat up to IVF_ROWS vectors, where a search takes some 10 ms; an inverted file beyond.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

IVF_ROWS = 50_000
_SAMPLE = 64  # training vectors per list; faiss asks for at least 39
_logger = logging.getLogger("paceline.rag")


@contextmanager
def _one_thread() -> Iterator[None]:
    """For one query: FAISS wakes a team of threads even for that, and waits for milliseconds where cores are taken.

    OpenMP keeps the number per calling thread.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


class VectorIndex:
    """Inner products over unit vectors. One thread at a time."""

    def __init__(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """ids: (n,), distinct; vectors: (n, dimensions)."""
        self.ids = set(ids.tolist())
        flat = faiss.IndexFlatIP(vectors.shape[1])
        self._index: faiss.IndexIDMap2 | faiss.IndexIVFFlat
        if len(ids) <= IVF_ROWS:
            self._index = faiss.IndexIDMap2(flat)
        else:
            lists = 2 * math.isqrt(len(ids))
            # An IVF keeps ids of its own; under an id map it could not remove any.
            self._index = faiss.IndexIVFFlat(flat, vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
            self._index.train(vectors[:: max(1, len(vectors) // (_SAMPLE * lists))])
            self._index.nprobe = max(1, lists // 8)
        if len(ids):
            self._index.add_with_ids(vectors, ids)

    @property
    def fits(self) -> bool:
        """False once it has grown or shrunk so much that it should be built anew."""
        flat = isinstance(self._index, faiss.IndexIDMap2)
        return len(self.ids) <= 2 * IVF_ROWS if flat else len(self.ids) > IVF_ROWS // 2

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._index.add_with_ids(vectors, ids)
        self.ids.update(ids.tolist())

    def remove(self, ids: Iterable[int]) -> None:
        gone = np.fromiter(ids, np.int64)
        self._index.remove_ids(faiss.IDSelectorBatch(gone))
        self.ids.difference_update(gone.tolist())

    def search(
        self, vector: NDArray[np.float32], k: int, among: NDArray[np.int64] | None = None
    ) -> list[tuple[int, float]]:
        """(id, cosine similarity), best first; fewer than k if there are not as many. `among`: no others than these."""
        k = min(k, len(self.ids) if among is None else len(among))
        if k < 1:
            return []
        parameters = None
        selector = None if among is None else faiss.IDSelectorBatch(among)  # held here while faiss reads it
        if selector is not None:
            if isinstance(self._index, faiss.IndexIDMap2):
                parameters = faiss.SearchParameters()
            else:  # few wanted of many could all lie in lists that are not looked at: then look at all
                parameters = faiss.SearchParametersIVF()
                parameters.nprobe = self._index.nlist
            parameters.sel = selector
        with _one_thread():
            scores, ids = self._index.search(vector.reshape(1, -1), k, params=parameters)
        return [(int(i), float(score)) for i, score in zip(ids[0], scores[0], strict=True) if i >= 0]

    def image(self, stamp: str) -> IndexImage:
        """For its file. `stamp`: of which rows it is made."""
        return IndexImage(stamp, faiss.serialize_index(self._index))

    def save(self, path: Path, stamp: str) -> None:
        image = self.image(stamp)
        if image.write(path):
            image.publish(path)

    @classmethod
    def load(cls, path: Path, stamp: str) -> VectorIndex | None:
        """None when there is no file, or it is of other rows, or damaged."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        seal, payload = data[:32], data[32:]
        if seal != _seal(stamp, payload):
            return None
        stored = faiss.deserialize_index(np.frombuffer(payload, np.uint8))
        index = cls.__new__(cls)
        if isinstance(stored, faiss.IndexIDMap2):
            index._index, index.ids = stored, set(faiss.vector_to_array(stored.id_map).tolist())
        elif isinstance(stored, faiss.IndexIVFFlat) and stored.invlists is not None:
            lists = stored.invlists
            parts = (faiss.rev_swig_ptr(lists.get_ids(i), lists.list_size(i)) for i in range(stored.nlist))
            index._index, index.ids = stored, {int(number) for part in parts for number in part}
        else:
            return None
        return index


@dataclass(frozen=True, slots=True)
class IndexImage:
    """A copy of an index as its file holds it. A failure is logged only: the index can always be built again."""

    stamp: str
    payload: NDArray[np.uint8]

    def write(self, path: Path) -> bool:
        """Beside the file, which `publish` replaces in one step."""
        try:
            descriptor = os.open(_aside(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(_seal(self.stamp, self.payload.data))
                stream.write(self.payload.data)
        except OSError as error:
            _complain(path, error)
            return False
        return True

    def publish(self, path: Path) -> None:
        try:
            _aside(path).replace(path)
        except OSError as error:
            _complain(path, error)


def remove(path: Path) -> None:
    """The file, and one that is being written beside it."""
    for file in (path, _aside(path)):
        file.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_suffix(".new")  # a fixed name: what a crash leaves behind is overwritten next time


def _complain(path: Path, error: OSError) -> None:
    _logger.warning("the index file %s was not written (%s); it will be built again", path, error.strerror)


def _seal(stamp: str, payload: bytes | memoryview) -> bytes:
    """32 bytes that say of which rows the payload was built, and that it is whole."""
    digest = hashlib.sha256(stamp.encode() + b"\0")
    digest.update(payload)
    return digest.digest()
