"""Vector search: a FAISS index, and the file that stores it between runs.

Derived data: a missing, stale or damaged file is rebuilt from the rows. Knows nothing of texts or SQLite. Flat up to
IVF_ROWS vectors, where a search takes about 10 ms; an inverted file (IVF) above.
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

from paceline.sealing import PLAIN_BOX, Box, DamagedError

IVF_ROWS = 50_000
_SAMPLE = 64  # training vectors per list; faiss asks for at least 39
_logger = logging.getLogger("paceline.rag")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit FAISS to the calling thread: for a single query, waking its thread team takes milliseconds on busy cores.

    OpenMP keeps the number of threads per calling thread.
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
            # An IVF stores ids itself; inside an id map it could not remove any.
            self._index = faiss.IndexIVFFlat(flat, vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
            self._index.train(vectors[:: max(1, len(vectors) // (_SAMPLE * lists))])
            self._index.nprobe = max(1, lists // 8)
        if len(ids):
            self._index.add_with_ids(vectors, ids)

    @property
    def fits(self) -> bool:
        """False once the number of vectors calls for the other kind of index, so that it should be rebuilt."""
        flat = isinstance(self._index, faiss.IndexIDMap2)
        return len(self.ids) <= 2 * IVF_ROWS if flat else len(self.ids) > IVF_ROWS // 2

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._index.add_with_ids(vectors, ids)
        self.ids.update(ids.tolist())

    def remove(self, ids: Iterable[int]) -> None:
        removed = np.fromiter(ids, np.int64)
        self._index.remove_ids(faiss.IDSelectorBatch(removed))
        self.ids.difference_update(removed.tolist())

    def search(
        self, vector: NDArray[np.float32], k: int, allowed: NDArray[np.int64] | None = None
    ) -> list[tuple[int, float]]:
        """At most k pairs (id, cosine similarity), best first. `allowed`: only these ids, all indexed; None: all."""
        k = min(k, len(self.ids) if allowed is None else len(allowed))
        if k < 1:
            return []
        parameters = None
        selector = None if allowed is None else faiss.IDSelectorBatch(allowed)  # referenced here while faiss reads it
        if selector is not None:
            if isinstance(self._index, faiss.IndexIDMap2):
                parameters = faiss.SearchParameters()
            else:  # the few allowed ids could all be in lists that are not probed: probe all
                parameters = faiss.SearchParametersIVF()
                parameters.nprobe = self._index.nlist
            parameters.sel = selector
        with _one_thread():
            scores, ids = self._index.search(vector.reshape(1, -1), k, params=parameters)
        return [(int(i), float(score)) for i, score in zip(ids[0], scores[0], strict=True) if i >= 0]

    def image(self, stamp: str) -> IndexImage:
        """A copy of the index for its file. `stamp`: identifies the rows it was built from."""
        return IndexImage(stamp, faiss.serialize_index(self._index))

    def save(self, path: Path, stamp: str, box: Box = PLAIN_BOX) -> None:
        image = self.image(stamp)
        if image.write(path, box):
            image.publish(path)

    @classmethod
    def load(cls, path: Path, stamp: str, box: Box = PLAIN_BOX) -> VectorIndex | None:
        """The index in a file; None when the file is missing, damaged, or built from rows of another stamp."""
        try:
            with path.open("rb") as stream:
                seal, payload = stream.read(32), b"".join(box.open_file(stream))
        except (OSError, DamagedError):
            return None
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
    """A serialised index. Failures to write are only logged, since the index can always be rebuilt."""

    stamp: str
    payload: NDArray[np.uint8]

    def write(self, path: Path, box: Box = PLAIN_BOX) -> bool:
        """Write a temporary file, which `publish` renames to `path`, since vectors tell texts: sealed with `box`.

        False if that failed.
        """
        try:
            descriptor = os.open(_temporary(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(_seal(self.stamp, self.payload.data))
                for piece in box.seal_file(_Reader(self.payload.data)):
                    stream.write(piece)
        except OSError as error:
            _log_failure(path, error)
            return False
        return True

    def publish(self, path: Path) -> None:
        try:
            _temporary(path).replace(path)
        except OSError as error:
            _log_failure(path, error)


class _Reader:
    """Reads memory piece by piece, without a copy of the whole."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def read(self, size: int, /) -> bytes:
        piece = bytes(self._data[self._position : self._position + size])
        self._position += len(piece)
        return piece


def remove(path: Path) -> None:
    """Remove the index file, and the temporary one beside it."""
    for file in (path, _temporary(path)):
        file.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_suffix(".new")  # a fixed name, so that the remains of a crash are overwritten


def _log_failure(path: Path, error: OSError) -> None:
    _logger.warning("the index file %s was not written (%s); it will be built again", path, error.strerror)


def _seal(stamp: str, payload: bytes | memoryview) -> bytes:
    """A 32-byte hash of stamp and payload: detects damage and other rows."""
    digest = hashlib.sha256(stamp.encode() + b"\0")
    digest.update(payload)
    return digest.digest()
