"""Choice of the engine that runs weights in safetensors on a CPU: torch's or llama.cpp, timed once with each model.

Both compute with the weights as they are. llama.cpp's are a copy of the file, in its own layout, with activations
rounded to the weights' format; it stays on the disk where llama.cpp is taken: faster, and exact.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine
from paceline.engine.llama_cpp.engine import load_gguf
from paceline.engine.llama_cpp.library import conditions, is_installed, measured
from paceline.errors import PacelineError
from paceline.hub.download import SHA256, path_part
from paceline.hub.gguf import GgufModel
from paceline.hub.quantize import is_convertible, quantized
from paceline.system import processor

log = logging.getLogger("paceline.engine")

ANSWERS: Final = 16  # written at once, besides one alone
SMALL: Final = 200 << 20  # bytes of weights below which both take about as long
_PROMPT: Final = tuple(range(3, 35))  # tokens
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a forward on one engine, seconds."""

    backend: str
    dtype: str
    is_exact: bool
    one: float  # a token of one answer
    many: float  # a token each of `ANSWERS`

    def __str__(self) -> str:
        doubt = "" if self.is_exact else " (approximate)"
        return f"{self.backend} in {self.dtype} {1e3 * self.one:.0f} and {1e3 * self.many:.0f} ms{doubt}"


def on_llama_cpp(
    directory: Path, name: str, fingerprint: str, threads: int | None, on_torch: Callable[[], Engine]
) -> GgufModel | None:
    """The model as llama.cpp runs it, where that is possible, exact, and faster: by the product of both times.

    fingerprint: of the weights. on_torch: loads the other engine. What was measured holds for this processor, these
    releases, and this number of threads.
    """
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    has_torch = find_spec("torch") is not None
    if (has_torch and size < SMALL) or not is_installed() or not is_convertible(directory):
        return None
    if not has_torch:
        return quantized(directory, None, fingerprint)

    def measure() -> list[Any]:
        log.info("%s is timed on both engines that can run it, once", name)
        model = quantized(directory, None, fingerprint)
        times = [timed(on_torch()), timed(load_gguf(model, name=name, threads=threads, streams=ANSWERS))]
        if not _is_better(*times):
            model.path.unlink(missing_ok=True)
        return [*map(asdict, times)]

    kept = f"engines/{path_part(fingerprint, SHA256)}.json"
    known = f"{processor()}, {conditions(threads or 0)}, torch {version('torch')}"
    try:
        on_torch_s, on_llama_s = (Times(**each) for each in measured(kept, known, measure))
    except PacelineError as error:  # such as too little room on the disk
        log.warning("%s is not timed, and runs on torch: %s", name, error)
        return None
    is_better = _is_better(on_torch_s, on_llama_s)
    first, second = (on_llama_s, on_torch_s) if is_better else (on_torch_s, on_llama_s)
    log.info("%s: a token of one answer, and one each of %d, take %s; %s", name, ANSWERS, first, second)
    return quantized(directory, None, fingerprint) if is_better else None


def _is_better(on_torch: Times, on_llama: Times) -> bool:
    return on_llama.is_exact and on_llama.one * on_llama.many < on_torch.one * on_torch.many


def timed(engine: Engine) -> Times:
    """The quickest of some forwards. Raises EngineError."""
    seqs = [SeqId(-1 - number) for number in range(ANSWERS)]
    engine.forward(Batch(tuple(Segment(seq, 0, _PROMPT) for seq in seqs)))
    found = []
    for count in (1, ANSWERS):
        seconds = []
        for _ in range(_TRIES):
            begin = time.perf_counter()
            engine.forward(Batch(tuple(Segment(seq, engine.length(seq), _PROMPT[:1]) for seq in seqs[:count])))
            seconds.append(time.perf_counter() - begin)
        found.append(min(seconds))
    for seq in seqs:
        engine.release(seq)
    return Times(engine.info.backend, engine.info.dtype, engine.info.is_exact, *found)
