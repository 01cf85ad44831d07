"""llama.cpp's forward of the same rows on the same shape, in a process of its own, so that two pools of threads never
share one process. Needs the packages `llama_cpp` (llama-cpp-python) and `gguf`, which are not dependencies."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from paceline.errors import EngineError

from .random_model import Shape

CONTEXT: Final = 1024  # rows of its KV cache, as many as ours
START_S: Final = 300.0


def missing() -> str | None:
    """A sentence naming the packages that are not installed; None if all are."""
    absent = [name for name in ("llama_cpp", "gguf") if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class LlamaCpp:
    """A model of this shape behind `prefix` cached rows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def forward(self, rows: int) -> None:
        """Logits of all rows, left in llama.cpp's memory; the rows are removed again. The time of a call has the
        pipe's round trip in it, some 0.05 ms.

        Raises EngineError if llama.cpp refuses the batch.
        """
        self._connection.send(rows)
        if (status := self._connection.recv()) != 0:
            raise EngineError(f"llama.cpp refused {rows} rows with status {status}")


@contextmanager
def llama_cpp(shape: Shape, prefix: int, rows: int) -> Iterator[LlamaCpp]:
    """Its process, with as many threads as torch has here, for up to `rows` rows at once; ended at the end.

    Raises EngineError if it does not start.
    """
    from .serving.gguf_file import write_gguf
    from .serving.model_files import ModelFiles

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        file = write_gguf(ModelFiles.write(Path(directory) / "model", shape), Path(directory) / "model.gguf")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, str(file), torch.get_num_threads(), prefix, rows), daemon=True
        )
        process.start()
        theirs.close()
        try:
            if not ours.poll(START_S) or ours.recv() != 0:
                raise EngineError("llama.cpp did not read the model")
            yield LlamaCpp(ours)
        except EOFError:
            raise EngineError("llama.cpp's process ended") from None
        finally:
            ours.close()
            process.join(10.0)
            if process.is_alive():
                process.terminate()
                process.join()


def _serve(connection: Connection, file: str, threads: int, prefix: int, rows: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    api: Any = importlib.import_module("llama_cpp")
    api.llama_backend_init()
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = CONTEXT
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(max(prefix, rows), 0, 1)
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def decode(start: int, count: int) -> int:
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.logits[i] = i % vocab, start + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        return int(api.llama_decode(context, batch))

    connection.send(decode(0, prefix))
    try:
        while True:
            status = decode(prefix, connection.recv())
            api.llama_synchronize(context)
            api.llama_memory_seq_rm(api.llama_get_memory(context), 0, prefix, -1)
            connection.send(status)
    except EOFError:  # the bench has ended
        api.llama_batch_free(batch)
        api.llama_free(context)
        api.llama_model_free(model)
