"""llama.cpp's C functions, as the package `xllamacpp` brings them: a model, and streams of rows in its KV cache.

Only what the engine needs is declared. Two records change their layout between releases, so the package is pinned, and
what the library fills them with is compared with what is declared.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError, EngineError
from paceline.hub.gguf import cache
from paceline.system import free_cores

Scores = NDArray[np.float32]

log = logging.getLogger("paceline.engine")

MOST_ROWS: Final = 56
"""Rows in one call. From 64 rows of a sequence on, its attention sums in another order."""

_SPLIT_FROM: Final = 256
"""Cached rows from which the attention of a row computed alone is divided among threads, and sums in another order."""

_PACKAGE: Final = "xllamacpp"
_PROBE: Final = 40  # rows that are computed to find out whether they are exact, several times
_PAGE: Final = 256  # rows of which llama.cpp makes a stream
_SPARE: Final = 256  # bytes behind a record, so that a longer one of another release overwrites nothing


# Fields of two records: name, type, and what the library fills them with.
_MODEL: Final[tuple[tuple[str, Any, object], ...]] = (
    ("devices", c_void_p, None),
    ("buffer_overrides", c_void_p, None),
    ("gpu_layers", c_int32, -1),
    ("split_mode", c_int, 1),
    ("load_mode", c_int, -1),
    ("lazy_mode", c_int, 1),
    ("main_gpu", c_int32, 0),
    ("tensor_split", c_void_p, None),
    ("progress", c_void_p, None),
    ("progress_data", c_void_p, None),
    ("kv_overrides", c_void_p, None),
    ("vocab_only", c_bool, False),
    ("check_tensors", c_bool, False),
    ("use_extra_buffers", c_bool, True),
    ("no_host", c_bool, False),
    ("no_alloc", c_bool, False),
    ("load_mtp", c_bool, False),
)
_CONTEXT: Final[tuple[tuple[str, Any, object], ...]] = (
    ("rows", c_uint32, 512),
    ("batch_rows", c_uint32, 2048),
    ("micro_batch_rows", c_uint32, 512),
    ("sequences", c_uint32, 1),
    ("snapshots", c_uint32, 0),
    ("outputs", c_uint32, 0),
    ("outputs_a_sequence", c_uint32, 1),
    ("threads", c_int32, 4),
    ("batch_threads", c_int32, 4),
    ("kind", c_int, 0),
    ("rope_scaling", c_int, -1),
    ("pooling", c_int, -1),
    ("attention", c_int, -1),
    ("flash_attention", c_int, -1),
    ("numbers", c_float * 6, (0.0, 0.0, -1.0, -1.0, -1.0, -1.0)),  # of rotary embeddings
    ("yarn_context", c_uint32, 0),
    ("defrag", c_float, -1.0),
    ("callback", c_void_p * 2, (None, None)),
    ("key_type", c_int, 1),
    ("value_type", c_int, 1),
    ("abort", c_void_p * 3, (None, None, None)),
    ("embeddings", c_bool, False),
    ("offload_kqv", c_bool, True),
    ("no_timing", c_bool, True),
    ("offload_operations", c_bool, True),
    ("whole_windows", c_bool, True),
    ("unified", c_bool, False),
    ("samplers", c_void_p, None),
    ("num_samplers", c_size_t, 0),
    ("other", c_void_p, None),
)


class _ModelParameters(ctypes.Structure):
    _fields_: ClassVar = [*(field[:2] for field in _MODEL), ("spare", c_uint8 * _SPARE)]


class _ContextParameters(ctypes.Structure):
    _fields_: ClassVar = [*(field[:2] for field in _CONTEXT), ("spare", c_uint8 * _SPARE)]


class _Batch(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_rows", c_int32),
        ("tokens", POINTER(c_int32)),
        ("embeddings", POINTER(c_float)),
        ("positions", POINTER(c_int32)),
        ("num_sequences", POINTER(c_int32)),
        ("sequences", POINTER(POINTER(c_int32))),
        ("scored", POINTER(c_int8)),
    ]


_Log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_WARNING: Final = 3  # of its levels
_FUNCTIONS: Final[dict[str, tuple[type | None, list[type]]]] = {
    "llama_log_set": (None, [_Log, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
    "llama_model_default_params": (_ModelParameters, []),
    "llama_context_default_params": (_ContextParameters, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParameters]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_n_params": (ctypes.c_uint64, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_model_free": (None, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_init_from_model": (c_void_p, [c_void_p, _ContextParameters]),
    "llama_free": (None, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (c_int32, [c_void_p, _Batch]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
    "llama_state_seq_get_size": (c_size_t, [c_void_p, c_int32]),
    "llama_state_seq_get_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
    "llama_state_seq_set_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
}


def is_installed() -> bool:
    return find_spec(_PACKAGE) is not None


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises ConfigError where the package is missing, cannot be loaded, or is of another layout."""
    found = find_spec(_PACKAGE)
    places = (found.submodule_search_locations if found else None) or ()
    files = [file for place in places for file in Path(place).glob(f"{_PACKAGE}.*") if file.suffix != ".py"]
    if not files:
        raise ConfigError("llama.cpp is not installed: pip install 'paceline[gguf]'")
    try:
        library = ctypes.CDLL(str(files[0]))  # the package itself, a server, is not imported
    except OSError as error:  # most often libgomp is missing, which a compiler brings
        raise ConfigError(f"llama.cpp cannot be loaded ({error}). Debian and Ubuntu: apt install libgomp1") from error
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise _unknown() from error
    library.llama_log_set(_hears, None)
    for declared, filled in (
        (_MODEL, library.llama_model_default_params()),
        (_CONTEXT, library.llama_context_default_params()),
    ):
        for name, _, expected in declared:
            value = getattr(filled, name)
            if (tuple(value) if isinstance(value, ctypes.Array) else value) != expected:
                raise _unknown()
    return library


def _unknown() -> ConfigError:
    return ConfigError(
        f"This release of {_PACKAGE} is not known here: pip install 'paceline[gguf]' brings one that is."
    )


_said: list[str] = []  # its last warning or error


def _hear(level: int, text: bytes, _: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if level >= _WARNING and line.strip("."):
        _said[:] = [line]
    if line:
        log.debug("llama.cpp: %s", line)


_hears: Final = _Log(_hear)  # kept, since the library calls it for good


def _reason() -> str:
    return _said[0] if _said else "it does not say why"


class Stretch(NamedTuple):
    """Rows to be written to a stream, from `start` on, and which of them are to be scored."""

    stream: int
    start: int
    tokens: Sequence[int]
    scored: Sequence[bool]


def measured(name: str, threads: int, measure: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """The measurement with so many threads at most, by this release on this processor: made before, or now. name: of
    the file in the cache that keeps it."""
    system = _library().llama_print_system_info().decode()
    conditions = f"{_PACKAGE} {version(_PACKAGE)}, {system}, at most {threads} threads"
    file = cache() / name
    try:
        kept: list[Any] = json.loads(file.read_text("utf-8"))
        if kept[0] == conditions:
            return kept[1:]
    except (OSError, ValueError, LookupError):
        pass
    found = measure()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([conditions, *found]), "utf-8")
    return found


class LlamaContext:
    """A model and its KV cache, in streams of equal size that do not touch. For one thread.

    A call computes as many rows of each of its streams, which follow one another, so that llama.cpp does not divide it.
    Then a row's numbers depend on no other row, if `is_exact`. llama.cpp writes to all of the cache when it makes it:
    so it is made small, and anew, with the rows that it holds, when it does not suffice (`resize`).
    """

    def __init__(self, file: Path, *, rows: int, threads: int, grows: bool = True) -> None:
        """One stream, empty. rows: of each at most. threads: at most; fewer while others need the cores. grows: up to
        `rows`; False where a row's numbers depend on how many there may be.

        Raises ConfigError for a file that llama.cpp does not load, and too little memory.
        """
        self._library = library = _library()
        _said.clear()
        self._model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        if not self._model:
            raise ConfigError(f"{file} cannot be loaded by llama.cpp: {_reason()}")
        self._rows, self._most_threads = rows, threads
        self._batch = library.llama_batch_init(MOST_ROWS, 0, 1)
        self._made: list[int] = []  # the context
        finalize(self, _free, library, self._model, self._made, self._batch)
        try:
            self.resize(0 if grows else rows, 1, ())
        except EngineError as error:
            raise ConfigError(f"{error} Choose a smaller --kv-mib.") from error
        self.vocab_size = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))
        self.num_weights = int(library.llama_model_n_params(self._model))
        if library.llama_model_is_recurrent(self._model) or library.llama_model_is_hybrid(self._model):
            raise ConfigError(f"{file} cannot be served: its model keeps a state in place of a row for each token.")
        self.least_rows, self.is_exact = 1, False  # until it is measured

    def resize(self, rows: int, streams: int, kept: Sequence[int]) -> None:
        """Make the cache for so many rows of each stream at least. kept: streams that are the first ones then.

        Raises EngineError, and changes nothing.
        """
        library = self._library
        capacity = min(-(-(rows + 1) // _PAGE), -(-(self._rows + 1) // _PAGE)) * _PAGE  # a row is computed beside one
        wanted = library.llama_context_default_params()
        wanted.rows, wanted.sequences, wanted.unified = capacity * streams, streams, False
        wanted.batch_rows = wanted.micro_batch_rows = MOST_ROWS
        wanted.flash_attention = 1  # which sums over a row's cache by itself
        wanted.threads = wanted.batch_threads = self._most_threads
        made = library.llama_init_from_model(self._model, wanted)
        if not made:
            raise EngineError(f"llama.cpp cannot keep {streams} times {capacity} rows: {_reason()}.")
        states = [self.state(stream) if self.length(stream) else b"" for stream in kept]
        self._threads = self._most_threads
        before, self._made[:] = [*self._made], [made]
        for context in before:
            library.llama_free(context)
        self._context, self._memory = made, library.llama_get_memory(made)
        self.capacity, self.num_streams = capacity - 1, streams
        for stream, state in enumerate(states):
            if state:
                self.restore(stream, state)

    def exactness(self) -> tuple[int, bool]:
        """`least_rows` and `is_exact`, measured: (1, True) if rows have the same scores however a text is divided and
        by however many threads it is computed, (2, True) if all have that are not computed alone, else (1, False)."""
        tokens = [(37 * i * i + 11 * i + 5) % self.vocab_size for i in range(_PROBE)]
        most = self._most_threads
        whole = self._divided(tokens, (_PROBE,), most)
        for least, widths in ((1, (1, 2, 3, 5, 7, 1, 1, 20)), (2, (2, 3, 4, 5, 6, 20))):
            if all(np.array_equal(whole, self._divided(tokens, widths, count)) for count in {1, most}):
                return least, True
        return 1, False

    def _divided(self, tokens: Sequence[int], widths: Sequence[int], threads: int) -> Scores:
        self._use(threads)
        found: list[Scores | None] = []
        for width in widths:
            start = len(found)
            (scores,) = self._decode([Stretch(0, start, tokens[start : start + width], [True] * width)])
            found += scores
        self.shorten(0, 0)
        return np.array(found)

    def _use(self, threads: int) -> None:
        if threads != self._threads:
            self._library.llama_set_n_threads(self._context, threads, threads)
            self._threads = threads

    def decode(self, stretches: Sequence[Stretch]) -> list[list[Scores | None]]:
        """The logits of each stretch's rows, None of those not to be scored. stretches: of equal length, of streams
        that follow one another, at most `MOST_ROWS` rows in all. Raises EngineError, and leaves nothing of them."""
        self._use(min(self._most_threads, free_cores()))
        return self._decode(stretches)

    def _decode(self, stretches: Sequence[Stretch]) -> list[list[Scores | None]]:
        batch, size = self._batch, len(stretches[0].tokens)
        is_alone = size == len(stretches) == 1
        is_divided = self._threads > 1 and stretches[0].start >= _SPLIT_FROM
        padding = int(is_alone and self.is_exact and (self.least_rows > 1 or is_divided))
        row = 0
        for stream, start, tokens, scored in stretches:
            for at in range(size + padding):
                batch.tokens[row], batch.positions[row] = tokens[min(at, size - 1)], start + at
                batch.num_sequences[row], batch.sequences[row][0] = 1, stream
                batch.scored[row] = at < size and scored[at]
                row += 1
        batch.num_rows = row
        flags = batch.scored[:row]
        if self.least_rows > 1 and sum(flags) == 1:
            batch.scored[flags.index(0)] = 1  # the last layer computes scored rows alone
        failed = self._library.llama_decode(self._context, batch)
        if failed or padding:
            for each in stretches:
                self.shorten(each.stream, each.start + (0 if failed else size))
        if failed:
            raise EngineError(f"llama.cpp could not compute {row} rows (its code {failed}): {_reason()}")
        return [
            [self._scores(place * size + at) if wanted else None for at, wanted in enumerate(each.scored)]
            for place, each in enumerate(stretches)
        ]

    def _scores(self, row: int) -> Scores:
        found = self._library.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(found, shape=(self.vocab_size,)).copy()

    def shorten(self, stream: int, length: int) -> None:
        """Drop its rows from this position on."""
        if not self._library.llama_memory_seq_rm(self._memory, stream, length, -1):
            raise EngineError("llama.cpp cannot take back rows of this model")

    def length(self, stream: int) -> int:
        return int(self._library.llama_memory_seq_pos_max(self._memory, stream)) + 1

    def state(self, stream: int) -> bytes:
        """Its rows, in a form of llama.cpp's own, whatever the number of streams. Raises EngineError."""
        size = self._library.llama_state_seq_get_size(self._context, stream)
        content = ctypes.create_string_buffer(size)
        written = self._library.llama_state_seq_get_data(self._context, content, size, stream)
        raw, at = memoryview(content)[:written], _HEAD
        kept = [raw[:at]]
        while at < written:  # each of the model's caches: its number of streams, and of each stream rows, or none
            at += _WORD
            for _ in range(self.num_streams):
                end = _end(raw, at)
                kept += [raw[at:end]] if end > at + _WORD else []
                at = end
        return b"".join(kept)

    def restore(self, stream: int, content: bytes) -> None:
        """Make these the rows of an empty stream. Raises EngineError, and leaves it empty."""
        raw, at = memoryview(content), _HEAD
        parts: list[bytes | memoryview] = [raw[:at]]
        while at < len(content):
            end = _end(raw, at)
            parts += [self.num_streams.to_bytes(_WORD, "little"), raw[at:end], bytes(_WORD * (self.num_streams - 1))]
            at = end
        whole = b"".join(parts)
        if not self._library.llama_state_seq_set_data(self._context, whole, len(whole), stream):
            self.shorten(stream, 0)
            raise EngineError(f"llama.cpp does not take the stored rows: {_reason()}")


_WORD: Final = 4
_HEAD: Final = 8  # bytes before the first cache
_CELL: Final = 12  # bytes of a row: its position, 1, and its sequence
_TENSOR: Final = 12  # bytes before a layer's keys or values: their type, and the size of a row


def _end(raw: memoryview, at: int) -> int:
    """Where one stream's rows end that begin here. Raises EngineError for what is none."""
    transposed, other = 0, [0]
    try:
        (rows,) = struct.unpack_from("<I", raw, at)
        if not rows:
            return at + _WORD
        at += _WORD + _CELL * rows
        transposed, layers, *other = struct.unpack_from("<IIII", raw, at)
        at += 4 * _WORD
        for _ in range(2 * layers):
            at += _TENSOR + rows * struct.unpack_from("<IQ", raw, at)[1]
    except struct.error:
        at = len(raw) + 1
    if at > len(raw) or transposed or any(other):
        raise EngineError("rows of llama.cpp are not of the layout that is known here")
    return at


def _free(library: ctypes.CDLL, model: int, contexts: Sequence[int], batch: _Batch) -> None:
    library.llama_batch_free(batch)
    for context in contexts:
        library.llama_free(context)
    library.llama_model_free(model)
