"""Document KV on disk: keys and values computed once, then mapped into memory instead of being computed again.

One safetensors file per document, preamble and model. Its name is derived from collection, text, model and token ids,
so that removing a document removes its files without loading a model. Collections share no file: that a text is stored
in one can neither be measured nor undone through another. Several processes may share a folder: files are written to a
temporary name and renamed, a damaged one counts as missing and is deleted, and the least recently used ones are evicted
above a limit. In a sealed store each file is encrypted with a key of its own, which stands wrapped at its beginning and
is overwritten before the file is removed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize, serialize_file

from paceline.core.batching.block_manager import CARRIERS, KvArray, KvPrefix
from paceline.errors import ConfigError
from paceline.rag.records import DEFAULT_COLLECTION
from paceline.sealing import PLAIN, DamagedError, Seal
from paceline.secret_files import private_folder

FOLDER = "kv"  # in the folder of the documents
_SUFFIX = ".safetensors"
SEALED_SUFFIX = ".aes"
_KEY = 60  # bytes of a wrapped key at the beginning of a sealed file
_MOST_SEALED = (1 << 31) - (1 << 20)  # bytes that can be sealed at once
Memory = mmap.mmap | bytearray
_HALF_WRITTEN = ".part"
_STALE_S = 3600.0  # age above which an unfinished file belongs to a killed process
_HEADER, _MAX_HEADER = 1 << 10, 1 << 20  # bytes: generous estimate of a header, and the largest accepted
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}  # safetensors' names first
_ARRAYS = ("tokens", "keys", "values")
_logger = logging.getLogger("paceline.rag")


def text_hash(text: str, collection: str = DEFAULT_COLLECTION, secret: bytes = b"") -> str:
    """The hash of a text of this collection in file names. Surrounding blanks do not change it.

    secret: `Seal.kv_secret` of the store.
    """
    content = text.strip().encode("utf-8", "surrogatepass")
    if secret:
        return hmac.digest(secret, collection.encode() + b"\0" + content, "sha256").hex()[:32]
    if collection == DEFAULT_COLLECTION:  # read by everybody
        return hashlib.sha256(content).hexdigest()[:32]
    return hmac.digest(collection.encode(), content, "sha256").hex()[:32]


@dataclass(frozen=True, slots=True)
class KvKey:
    """Identity of stored KV: one document of one collection under one model and preamble."""

    text: str  # `text_hash` of the document as it stands in the prompt, within its collection
    model: str  # fingerprint, name of its files, number format and backend: equal where the computed KV is equal
    tokens: tuple[int, ...]  # preamble and document

    @property
    def group(self) -> str:
        """The common prefix of file names of this text, collection and model."""
        return f"{self.text}-{hashlib.sha256(self.model.encode()).hexdigest()[:16]}-"

    @property
    def file(self) -> str:
        ids = np.array(self.tokens, dtype="<i8").tobytes()
        return f"{self.group}{hashlib.sha256(ids).hexdigest()[:32]}{_SUFFIX}"


class _Stored(NamedTuple):
    """The content of a file, over its mapped memory."""

    metadata: dict[str, str]
    arrays: dict[str, KvArray]

    @property
    def checksum(self) -> str:
        facts = sorted(item for item in self.metadata.items() if item[0] != "checksum")
        shapes = [(self.arrays[name].dtype.str, self.arrays[name].shape) for name in _ARRAYS]
        crc = zlib.crc32(json.dumps([facts, shapes]).encode())
        for name in _ARRAYS:
            crc = zlib.crc32(np.ascontiguousarray(self.arrays[name]).reshape(-1).view(np.uint8).data, crc)
        return str(crc)


class DocumentKvStore:
    """Files in one folder, of at most `limit` bytes together. Safe to use from several threads.

    If the folder cannot be used, nothing is found or stored and a warning is logged: a full disk never fails a request.
    """

    def __init__(self, folder: Path, limit: int, *, seal: Seal = PLAIN) -> None:
        """seal: of the store whose documents these are."""
        self._folder = folder
        self._seal = seal
        self._suffix = SEALED_SUFFIX if seal.is_on else _SUFFIX
        self._limit = limit
        self._lock = threading.Lock()
        self._checked: set[tuple[str, int, int, int]] = set()  # files whose checksum has been verified

    def get(self, key: KvKey) -> KvPrefix | None:
        """KV over the mapped file, readable even after the file is removed; None if there is no undamaged file."""
        path = self._path(key)
        try:
            with path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_size > 0:
                    memory: Memory
                    if self._seal.is_on:
                        stored = stream.read()
                        memory = bytearray(self._seal.box(stored[:_KEY], path.name).open(stored[_KEY:], "kv"))
                    else:
                        # copy-on-write: pages are shared with the file until written to, and writes never reach it
                        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                    prefix = self._verified(key, memory, (path.name, status.st_ino, status.st_size, status.st_mtime_ns))
                    os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
                    return prefix
                raise ValueError("it is empty")
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.warning("stored KV cannot be read: %s", error)
        except (ValueError, KeyError, TypeError, AttributeError, DamagedError) as error:
            _logger.warning("stored KV is damaged and will be computed again: %s: %s", path.name, error)
            path.unlink(missing_ok=True)
        return None

    def put(self, key: KvKey, prefix: KvPrefix) -> bool:
        """Store KV and evict the least recently used files. False when it could not be stored."""
        assert key.tokens == prefix.tokens, "the key must be of the stored tokens"
        if prefix.num_bytes > min(self._limit, _MOST_SEALED if self._seal.is_on else self._limit):
            return False
        path = self._path(key)
        part = path.with_name(f".{os.getpid()}-{threading.get_ident()}-{path.name}{_HALF_WRITTEN}")
        try:
            private_folder(self._folder)
            if path.exists():
                return True
            try:
                _write(part, key, prefix, self._sealed(path) if self._seal.is_on else None)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            self._evict(keep=path.name)
        except (OSError, SafetensorError, ConfigError) as error:  # the second also where the disk is full
            _logger.warning("KV of a document cannot be kept: %s", error)
            return False
        return True

    def groups(self) -> set[str]:
        """`KvKey.group` of all files."""
        return {name[: name.rindex("-") + 1] for name, _, _ in self._files() if "-" in name}

    def num_bytes(self) -> int:
        return sum(size for _, size, _ in self._files())

    def has_room(self, prefix: KvPrefix) -> bool:
        """True if this KV can be stored without evicting anything."""
        return self.num_bytes() + prefix.num_bytes + 8 * len(prefix.tokens) + _HEADER <= self._limit

    def forget(self, texts: Iterable[str]) -> int:
        """Remove the files of these texts, given by `text_hash`, for all models. Returns the number removed."""
        removed = set(texts)
        return self._remove(name for name, _, _ in self._files() if name.split("-")[0] in removed)

    def retain(self, texts: Callable[[], set[str]]) -> int:
        """Remove the files of all other texts. `texts` is called after the folder has been listed, so that KV of
        documents added meanwhile is kept. Returns the number removed.
        """
        names = [name for name, _, _ in self._files()]
        kept = texts()
        return self._remove(name for name in names if name.split("-")[0] not in kept)

    def text_hash(self, passage_text: str, collection: str) -> str:
        """`KvKey.text` of a text in this store."""
        return text_hash(passage_text, collection, self._seal.kv_secret)

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _path(self, key: KvKey) -> Path:
        return (self._folder / key.file).with_suffix(self._suffix)

    def _sealed(self, path: Path) -> Callable[[bytes], bytes]:
        """A function from the content of this file to what is stored: the wrapped key, then the sealed content."""
        stored, box = self._seal.make_key(path.name)
        assert len(stored) == _KEY, "a key is wrapped in so many bytes"
        return lambda content: stored + box.seal(content, "kv")

    def _verified(self, key: KvKey, memory: Memory, stamp: tuple[str, int, int, int]) -> KvPrefix:
        """The KV in a file. Raises ValueError, KeyError or TypeError for content that does not match its name."""
        stored = _read(memory)
        with self._lock:
            checked = stamp in self._checked
        if not checked:  # also pages the file in here, rather than on the engine's thread
            if stored.checksum != stored.metadata["checksum"]:
                raise ValueError("its checksum is wrong")
            with self._lock:
                self._checked.add(stamp)
        tokens, keys, values = (stored.arrays[name] for name in _ARRAYS)
        if stored.metadata["model"] != key.model or tokens.tolist() != list(key.tokens):
            raise ValueError("it is of another model or other tokens")
        return KvPrefix(stored.metadata["fingerprint"], stored.metadata["dtype"], key.tokens, keys, values)

    def _files(self) -> list[tuple[str, int, int]]:
        """(name, bytes, last use in ns)"""
        found: list[tuple[str, int, int]] = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith((_SUFFIX, SEALED_SUFFIX)):
                        try:
                            status = entry.stat()
                        except FileNotFoundError:  # another process has just removed it
                            continue
                        found.append((entry.name, status.st_size, status.st_atime_ns))
        except FileNotFoundError:
            pass
        return found

    def _evict(self, keep: str) -> None:
        files = sorted(self._files(), key=lambda file: file[2])
        total = sum(size for _, size, _ in files)
        for name, size, _ in files:
            if total <= self._limit:
                break
            if name != keep:
                self._remove([name])
                total -= size
        for part in self._folder.glob(f".*{_HALF_WRITTEN}"):
            try:
                if time.time() - part.stat().st_mtime > _STALE_S:
                    part.unlink(missing_ok=True)
            except FileNotFoundError:
                continue

    def _remove(self, names: Iterable[str]) -> int:
        removed = 0
        for name in list(names):
            path = self._folder / name
            try:
                if name.endswith(SEALED_SUFFIX):
                    _destroy_key(path)
                path.unlink()
                removed += 1
            except FileNotFoundError:
                continue
        return removed


def _destroy_key(path: Path) -> None:
    """Overwrite the key of a sealed file, without which what the disk keeps of it says nothing. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, bytes(_KEY))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(part: Path, key: KvKey, prefix: KvPrefix, sealed: Callable[[bytes], bytes] | None) -> None:
    """Write and sync the whole file. sealed: from its content to what is stored; None: as it is."""
    arrays: dict[str, KvArray] = {"tokens": np.array(prefix.tokens, dtype="<i8")}
    arrays |= {"keys": np.ascontiguousarray(prefix.keys), "values": np.ascontiguousarray(prefix.values)}
    metadata = {"model": key.model, "fingerprint": prefix.model, "dtype": prefix.dtype}
    metadata["checksum"] = _Stored(metadata, arrays).checksum
    specs = {
        name: TensorSpec(
            dtype="int64" if name == "tokens" else prefix.dtype,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    part.touch(mode=0o600)
    if sealed is None:
        serialize_file(specs, part, metadata=metadata)
    else:
        part.write_bytes(sealed(serialize(specs, metadata=metadata)))
    with part.open("rb") as stream:
        os.fsync(stream.fileno())  # before the rename, so that a power cut leaves no empty file under the final name


def _read(memory: Memory) -> _Stored:
    """Parse the safetensors format without copying: 8 bytes with the header's length, the header in JSON, the data."""
    length = int.from_bytes(memory[:8], "little")
    begin = 8 + length
    if not 0 < length <= min(_MAX_HEADER, len(memory) - 8):
        raise ValueError("it has no header")
    header = json.loads(memory[8:begin])
    metadata = header.pop("__metadata__")
    arrays: dict[str, KvArray] = {}
    for name, tensor in header.items():
        dtype, shape, (first, last) = CARRIERS[_DTYPES[tensor["dtype"]]], tensor["shape"], tensor["data_offsets"]
        count = math.prod(shape)
        if not 0 <= first <= last <= len(memory) - begin or last - first != count * dtype.itemsize:
            raise ValueError("it is cut off")
        arrays[name] = np.frombuffer(memory, dtype, count, begin + first).reshape(shape)
    return _Stored(metadata, arrays)
